"""What a rank of the fault rig runs: it does one job after the other, and says how each ended and what it left behind.

Only the standard library is imported before a job runs: the process that ranks are forked from has the rest.
"""

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tests.faults.shim import attach
from tests.ranks import save_coverage
from tests.storage import in_small_batches

MAX_GROWTH_BYTES = 16 << 20
"""Anonymous memory that one attempt may leave: the allocator's, and what Python and torch keep for the next one."""
SETTLE_S = 1.0
"""Until what a job held is let go: gloo's threads keep the tensors of an exchange a moment longer than it takes."""
MARK = "mark-"


@dataclass(frozen=True)
class Command:
    """One job on one rank: what it loads is `checkpoint` in the folder, the ds_config `ds.json`.

    Entering one of the functions of `marks` makes a folder of that name, at which a rule can hold the rank.
    """

    job: str
    folder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


@dataclass
class Answer:
    """How a job ended: the error, and whether it is one of lowmem_load's, or a digest of what this rank holds.

    `at` is by `time.perf_counter`, the same clock in all processes of a machine; `left` is what is not as before.
    """

    kind: str = ""
    is_ours: bool = False
    text: str = ""
    digest: str = ""
    at: float = 0.0
    left: list[str] = field(default_factory=list)
    where: str = ""


# -- jobs ------------------------------------------------------------------------------------------------------------


def load(ds_config: Any = "ds.json", **kwargs: Any) -> Any:
    from lowmem_load import load_model

    return load_model("checkpoint", ds_config, **kwargs)


def stream(ds_config: Any = "ds.json", fails_on: int | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    from lowmem_load.integrations.install import streaming

    with streaming(ds_config):
        if fails_on == int(os.environ["RANK"]):
            raise LookupError("of the user's own code")
        return AutoModelForCausalLM.from_pretrained("checkpoint")


def train(ds_config: Any = "ds.json") -> Any:
    import lowmem_load

    model = lowmem_load.load_model("checkpoint", "load.json", partition="model.layers.*")
    return lowmem_load.initialize_partial(model, ds_config)


def read_once(ds_config: Any = "ds.json") -> Any:
    """Loads whole on each rank, of which each reads its share."""
    from lowmem_load import get_load_report

    config = json.loads(Path(ds_config).read_text())
    with in_small_batches():
        model = load({**config, "zero_optimization": {"stage": 0}}, share_reads="job")
    assert get_load_report(model).received_bytes > get_load_report(model).read_bytes // 2
    return model


def resume(ds_config: Any = "ds.json") -> Any:
    """Saves the states of an engine, and loads them again."""
    import deepspeed

    from lowmem_load import load_checkpoint

    config = json.loads(Path(ds_config).read_text())
    engine = deepspeed.initialize(model=load(config), config=config)[0]
    engine.save_checkpoint("../saved")
    load_checkpoint(engine, "../saved")
    return engine


def fill_changed(ds_config: Any = "ds.json") -> Any:
    """Fills the shards of a model that was lazy, one weight of which was changed."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from lowmem_load import lazy
    from lowmem_load.load.lazy import fill_sharded

    model = lazy("checkpoint")
    model.lm_head.weight.data.mul_(2)
    state = model.state_dict()
    fully_shard(model.to("meta"))
    fill_sharded(model, state, torch.device("cpu"))
    for buffer in model.buffers():  # those that are no weights the caller fills
        buffer.zero_()
    return model


def pack(ds_config: Any = "ds.json") -> Any:
    """Loads into 4 bits, with scales that the ranks combine."""
    from transformers import BitsAndBytesConfig

    return load(ds_config, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True))


JOBS: dict[str, Callable[..., Any]] = {
    "load": load,
    "stream": stream,
    "train": train,
    "once": read_once,
    "resume": resume,
    "changed": fill_changed,
    "pack": pack,
}


def digest_of(model: Any) -> str:
    """Returns a digest of all that this rank holds of a model, or of the model of an engine."""
    import torch

    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode())
        held = getattr(tensor, "ds_tensor", getattr(tensor, "_local_tensor", tensor))
        found.update(held.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy())
    return found.hexdigest()[:16]


# -- what is left behind ---------------------------------------------------------------------------------------------


@dataclass
class Held:
    """What this process holds at one moment. Of names: what they stand for in the modules that loads patch."""

    files: Counter[str]
    threads: Counter[str]
    num_tasks: int
    anonymous_bytes: int
    tensors: Counter[str]
    names: dict[str, Any]
    random: bytes
    modes: tuple[Any, ...]


def held() -> Held:
    """Returns what is held now."""
    import deepspeed
    import torch
    import transformers
    import transformers.integrations.deepspeed
    import transformers.modeling_utils
    from transformers.utils import logging

    gc.collect()
    # Freed blocks of megabytes may stay in the heap once one of them was freed (M_MMAP_THRESHOLD in mallopt(3)).
    ctypes.CDLL(None).malloc_trim(0)
    owners = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
        "torch.nn.functional": torch.nn.functional,
        "torch.nn.init": torch.nn.init,
        "deepspeed": deepspeed,
        "PreTrainedModel": transformers.PreTrainedModel,
        "modeling_utils": transformers.modeling_utils,
        "integrations.deepspeed": transformers.integrations.deepspeed,
    }
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
        except FileNotFoundError:  # the listing's own
            continue
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor | torch.nn.Module)]
    return Held(
        files=Counter(links),
        threads=Counter(thread.name for thread in threading.enumerate()),
        num_tasks=len(os.listdir("/proc/self/task")),
        anonymous_bytes=_anonymous_bytes(),
        tensors=Counter(type(o).__name__ for o in alive),
        names={f"{owner}.{name}": value for owner, of in owners.items() for name, value in vars(of).items()},
        random=torch.get_rng_state().numpy().tobytes(),
        modes=(
            torch._C._len_torch_function_stack(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            logging.get_verbosity(),
            logging.is_progress_bar_enabled(),
            os.getcwd(),
        ),
    )


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def differences(before: Held, after: Held, *, drew: bool) -> list[str]:
    """Returns what is not as it was. A load that ended well may have drawn random numbers (`drew`)."""
    found = [f"name {name}" for name, value in before.names.items() if after.names.get(name) is not value]
    for what in ("files", "threads", "tensors"):
        more = getattr(after, what) - getattr(before, what)
        found += [f"{count} more of {what}: {name}" for name, count in more.items()]
    if after.num_tasks > before.num_tasks:
        found.append(f"{after.num_tasks - before.num_tasks} more threads of the system")
    growth = after.anonymous_bytes - before.anonymous_bytes
    if growth > MAX_GROWTH_BYTES:
        found.append(f"{growth >> 20} MiB more memory")
    if after.random != before.random and not drew:
        found.append("random state")
    if after.modes != before.modes:
        found.append(f"modes {after.modes} instead of {before.modes}")
    return found


# -- the rank --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def marking(marks: tuple[str, ...]) -> Iterator[None]:
    """Inside, entering one of these functions of the package makes the folder `mark-<name>`."""

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in marks and "lowmem_load" in frame.f_code.co_filename:
            with contextlib.suppress(FileExistsError):
                os.mkdir(MARK + frame.f_code.co_name)

    if marks:
        sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def attempt(command: Command) -> Answer:
    """Does a job; returns how it ended."""
    from lowmem_load import LowMemLoadError

    os.chdir(command.folder)
    before, answer = held(), Answer()
    try:
        with marking(command.marks):
            model = JOBS[command.job](**command.arguments)
        answer.at = time.perf_counter()
        answer.digest = digest_of(model)
        del model
    except BaseException as error:
        answer.at = time.perf_counter()
        answer.kind, answer.text = type(error).__name__, str(error)
        answer.is_ours, answer.where = isinstance(error, LowMemLoadError), _place(error)
    deadline = time.perf_counter() + SETTLE_S
    while (left := differences(before, held(), drew=not answer.kind)) and time.perf_counter() < deadline:
        time.sleep(0.05)
    answer.left = left
    return answer


def _place(error: BaseException) -> str:
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(places[-6:])


def serve(address: str, control: str, log: str, env: dict[str, str], group_timeout_s: float) -> None:
    """Runs in the rank: does what comes through the connection until it closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the process it was forked from
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.environ.update(env)
    attach(control)
    with Client(address) as connection:
        connection.send((int(env["RANK"]), os.getpid()))
        with contextlib.suppress(EOFError, OSError):  # the parent is gone, or has had enough
            _serve(connection, group_timeout_s)
    os._exit(0)


def _serve(connection: Any, group_timeout_s: float) -> None:
    from lowmem_load.distributed.process_group import DistributedInterface

    ready = False
    while True:
        command = connection.recv()
        if not ready:
            DistributedInterface(timeout=timedelta(seconds=group_timeout_s))
            ready = True
        answer = attempt(command)
        save_coverage()
        connection.send(answer)
