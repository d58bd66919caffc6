"""streaming: loads inside code that calls `from_pretrained` by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lowmem_load.api.load_model import streaming_by_active_config, streaming_by_config
from lowmem_load.config.settings import Partition
from lowmem_load.errors import ConfigError
from lowmem_load.pipeline.load import Options


@contextlib.contextmanager
def streaming(
    ds_config: Any = None,
    *,
    progress: bool | None = None,
    partition: Partition | None = None,
    data_parallel_group: Any = None,
    verify: bool = False,
    stream: bool = False,
) -> Iterator[None]:
    """Inside, any `from_pretrained` of a transformers model loads as `load_model` does, whoever calls it.

    Under stages 0 to 2 models keep the dtype that the caller asked for; under stage 3 the ds_config decides, as with
    stock ZeRO-3. Other threads load in the ordinary way. On exit everything is as before.

    Args:
        ds_config: as for `load_model`. None follows transformers: each load goes by the ZeRO-3 configuration that
            TrainingArguments, accelerate's plugin or an `HfDeepSpeedConfig` has set. Where accelerate will shard the
            model by FSDP2, it is lazy, as by `lazy`, also after the block. Else loads are ordinary.
        progress: as for `load_model`.
        partition: as for `load_model`, for each model that is loaded inside. A model without a chosen module stays
            whole.
        data_parallel_group: as for `load_model`.
        verify: as for `load_model`.
        stream: as for `load_model`.

    Raises:
        ConfigError: ds_config cannot be used. Loads inside raise as `load_model` does.
    """
    options = Options(progress=progress, verify=verify, stream=stream)
    if ds_config is not None:
        with streaming_by_config(ds_config, options, partition=partition, data_parallel_group=data_parallel_group):
            yield
        return
    if partition is not None or data_parallel_group is not None:
        raise ConfigError("streaming() without a ds_config takes neither partition nor data_parallel_group")
    from lowmem_load.integrations.accelerate_fsdp2 import lazy_loads  # a load by a ds_config needs none of it

    with streaming_by_active_config(options), lazy_loads(options, everywhere=False):
        yield
