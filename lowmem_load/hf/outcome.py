"""What a conversion of transformers comes to, as data, and set again. Part of the transformers seam, see `loader.py`.

See [Note: the outcome] in `plan_cache.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowmem_load.describe.initialise import ReadNow
from lowmem_load.describe.pointwise import Pointwise, pointwise_of
from lowmem_load.describe.tensor import SymbolicTensor
from lowmem_load.errors import CheckpointError
from lowmem_load.formats.format import CheckpointFile
from lowmem_load.formats.templates import NotDataError, Teller, Template
from lowmem_load.hf import mxfp4
from lowmem_load.hf.names import quantization_method
from lowmem_load.hf.symbolic_file import SymbolicSlice
from lowmem_load.planning.expression import Expression, Held, Source

logger = logging.getLogger(__name__)

SETTER = "set_param_for_module"
"""transformers' function that sets a parameter of a model."""

CONVERSIONS = "_weight_conversions"
"""Attribute of a model: the conversions by which it is saved."""

_DEQUANTIZING = ("fp8", "mxfp4")
"""Quantizers whose conversions do nothing but dequantize."""

MAX_STRIDE = 1 << 48


class Conversion:
    """A call of transformers' function.

    Args:
        module: that has it.
        read_now: of the load.
        call: its arguments.

    Attributes:
        files: of the checkpoint, in the order in which transformers has their first tensors.
        tensors: a digest of the number of the file and the name of each tensor, as transformers has them.
        state: shapes of the parameters and buffers that are expected, by name.

    Raises:
        NotDataError: its outcome cannot be kept.
    """

    def __init__(self, module: Any, read_now: ReadNow, call: Mapping[str, Any]) -> None:
        self.module, self.read_now = module, read_now
        self.model: nn.Module = call["model"]
        self.load_config: Any = call["load_config"]
        self._refuse(call)
        numbers: dict[int, int] = {}
        self.files: list[CheckpointFile] = []
        digest = hashlib.sha256()
        for name, tensor in call["state_dict"].items():
            if not isinstance(tensor, SymbolicSlice) or tensor.name != name:
                raise NotDataError("tensors that come from elsewhere than safetensors files, or under other names")
            file = tensor.file
            if id(file) not in numbers:
                numbers[id(file)] = len(self.files)
                self.files.append(file)
            digest.update(f"{numbers[id(file)]} {name}\n".encode("utf-8", "surrogatepass"))
        self.tensors = digest.hexdigest()
        self.state = {name: tuple(each.shape) for name, each in self.model.state_dict().items()}

    def _refuse(self, call: Mapping[str, Any]) -> None:
        config, quantizer = self.load_config, self.load_config.hf_quantizer
        # A model's tp_plan, which releases before 5.16 hand over, says nothing without a mesh.
        placed = (call.get("disk_offload_index"), config.device_map, getattr(config, "device_mesh", None))
        if any(each is not None for each in placed):
            raise NotDataError("a model that is placed, or parallelised, by transformers")
        if getattr(self.model, "_hf_peft_config_loaded", False):
            raise NotDataError("adapters")
        if quantizer is not None:
            method = quantization_method(quantizer.quantization_config)
            is_dequantized = getattr(quantizer.quantization_config, "dequantize", False)
            if method not in _DEQUANTIZING or not is_dequantized or not quantizer.pre_quantized:
                raise NotDataError(f"weights quantized by {method}")

    @property
    def setter(self) -> Callable[..., Any]:
        """Return transformers' function that sets a parameter."""
        found: Callable[..., Any] = getattr(self.module, SETTER)
        return found

    @functools.cached_property
    def ends(self) -> list[int]:
        """Numbers of tensors at which each file ends."""
        return list(itertools.accumulate(len(file.names) for file in self.files))

    def expression(self, number: Any) -> Expression:
        """Return the tensor of a number. Raises ValueError if there is none."""
        if type(number) is not int or not 0 <= number < (self.ends[-1] if self.ends else 0):
            raise ValueError("a tensor that the files do not have")
        place = bisect.bisect_right(self.ends, number)
        file = self.files[place]
        return file.expression(file.names[number - self.ends[place] + len(file.names)])

    def told(self, calls: Sequence[tuple[str, Any]], info: Any, others: Any) -> bytes:
        """Return the outcome as JSON: see [Note: the outcome].

        Raises:
            NotDataError: names what cannot be told.
        """
        if others or any(getattr(info, name, None) for name in ("error_msgs", "conversion_errors", "skipped_pp_keys")):
            raise NotDataError("a conversion with errors, or one that is not for all of the model")
        mismatched = {name for name, *_ in info.mismatched_keys}
        names = Named(self.read_now)
        teller = Teller(names, self._numbers())
        targets, values = [], set[int]()
        for name, value in calls:
            if type(value) is not SymbolicTensor:
                raise NotDataError(f"a {type(value).__name__} for {name}")
            if not value.views and id(value.value) in values:
                raise NotDataError("parameters that are one value")
            values.add(id(value.value))
            strides = None if value.is_contiguous() else list(value.stride())
            trained = value.requires_grad if isinstance(value, nn.Parameter) else None
            targets.append([name, *teller.told(value.expression), strides, trained])
        try:
            for nodes in teller.templates:
                Template(nodes, names)
        except CheckpointError as error:  # nothing is kept that would be refused
            raise NotDataError(str(error)) from error
        outcome = {
            "templates": teller.templates,
            "targets": targets,
            "mismatched": sorted(mismatched),
            "unexpected": sorted(info.unexpected_keys),
            "used": [place for place, each in enumerate(self.mapping) if getattr(each, "_was_used", False)],
            "conversions": self._conversions(),
        }
        return json.dumps(outcome, separators=(",", ":")).encode()

    def _numbers(self) -> Callable[[Source], int]:
        """Return what gives the number of a tensor; raises NotDataError for what is none of the files'."""
        starts = {file.path: (start, file) for start, file in zip([0, *self.ends], self.files, strict=False)}

        @functools.cache
        def places(path: str) -> dict[str, int]:
            return {name: place for place, name in enumerate(starts[path][1].names)}

        def number_of(source: Source) -> int:
            place = places(source.path).get(source.name) if source.path in starts else None
            start, file = starts.get(source.path, (0, None))
            if file is None or place is None or file.expression(source.name) != source:
                raise NotDataError("what is no tensor of the files")
            return start + place

        return number_of

    @property
    def mapping(self) -> Sequence[Any]:
        """The conversions, used or not."""
        return self.load_config.weight_mapping or []

    def _conversions(self) -> list[int]:
        """Return which conversions transformers has left with the model, for saving it."""
        places = {id(each): place for place, each in enumerate(self.mapping)}
        left = getattr(self.model, CONVERSIONS, None)
        if left is None or not all(id(each) in places for each in left):
            raise NotDataError("conversions of another origin")
        return [places[id(each)] for each in left]


class Outcome:
    """An outcome that was read.

    Args:
        content: JSON, untrusted.
        conversion: which it is to stand for.

    Raises:
        CheckpointError: it is malformed, or does not fit the files or the model.
    """

    def __init__(self, content: bytes, conversion: Conversion) -> None:
        try:
            self._read(json.loads(content), conversion)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"an outcome that is malformed, or does not fit: {error}") from error

    def _read(self, told: Any, conversion: Conversion) -> None:
        names = Named(conversion.read_now)
        templates = [Template(nodes, names) for nodes in told["templates"]]
        self._unexpected, mismatched = _texts(told["unexpected"]), set(_texts(told["mismatched"]))
        if not conversion.state.keys().isdisjoint(self._unexpected):
            raise ValueError("a parameter that nobody expects")
        self._used, self._conversions = (
            [_place(each, conversion.mapping) for each in told[name]] for name in ("used", "conversions")
        )
        self._targets = [_Target.of(target, templates, conversion) for target in told["targets"]]
        names_set = [target.name for target in self._targets]
        if len(set(names_set)) < len(names_set):
            raise ValueError("a parameter that is set twice")
        for target in self._targets:
            shape = target.expression.shape
            if (conversion.state[target.name] == shape) is (target.name in mismatched):
                raise ValueError(f"{target.name}: a shape of {shape}")

    def replay(self, conversion: Conversion) -> Any:
        """Set the parameters of the model as transformers has; return its loading info."""
        info = self._info(conversion)
        setter = conversion.setter
        given = {"model": conversion.model, "loading_info": info, "hf_quantizer": conversion.load_config.hf_quantizer}
        if "distributed_operation" in inspect.signature(setter).parameters:  # before 5.16
            given["distributed_operation"] = None
        for target in self._targets:
            value: torch.Tensor = SymbolicTensor(target.expression, conversion.read_now, target.twin)
            if target.trained is not None:
                value = nn.Parameter(value, requires_grad=target.trained)
            setter(target_name=target.name, param_value=value, **given)
        for place in self._used:
            conversion.mapping[place]._was_used = True
        setattr(conversion.model, CONVERSIONS, [conversion.mapping[place] for place in self._conversions])
        return info

    def _info(self, conversion: Conversion) -> Any:
        """Return transformers' loading info before anything is set."""
        info = conversion.module.LoadStateDictInfo
        fields: dict[str, Any] = {field.name: set() for field in dataclasses.fields(info)}
        fields |= {"conversion_errors": {}, "error_msgs": []}
        fields |= {"missing_keys": set(conversion.state), "unexpected_keys": set(self._unexpected)}
        return info(**fields)


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter or buffer, and what it is set to.

    Attributes:
        twin: has the strides of one that is not contiguous.
        trained: whether it requires gradients, where it is set to a parameter; None for a tensor.
    """

    name: str
    expression: Expression
    twin: torch.Tensor | None
    trained: bool | None

    @staticmethod
    def of(told: Any, templates: Sequence[Template], conversion: Conversion) -> _Target:
        """Return the target that was told. Raises ValueError, or another error of malformed data."""
        name, template, numbers, strides, trained = told
        made_by, tensors = templates[_place(template, templates)], list(map(conversion.expression, numbers))
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != made_by.tensors:
            raise ValueError(f"{name}: tensors of other shapes or dtypes")
        twin = None
        if strides is not None:
            if len(strides) != len(made_by.shape) or not all(type(s) is int and 0 <= s <= MAX_STRIDE for s in strides):
                raise ValueError(f"{name}: strides")
            twin = torch.empty_strided(made_by.shape, strides, dtype=made_by.dtype, device="meta")
        if trained is not None and (type(trained) is not bool or (trained and not made_by.dtype.is_floating_point)):
            raise ValueError(f"{name}: gradients")
        return _Target(name, made_by.made(tensors), twin, trained)


class Named:
    """How functions and values are told: see `formats.templates.Names`.

    Args:
        read_now: of the load.
    """

    def __init__(self, read_now: ReadNow) -> None:
        self._look_up = functools.cache(functools.partial(mxfp4.look_up_of, read_now=read_now))

    def told_function(self, function: Any) -> Any:
        """Return JSON; None for a function that has no name."""
        if isinstance(function, mxfp4.LookUp):
            return ["mxfp4", str(function.table.dtype).removeprefix("torch.")]
        return function.told() if isinstance(function, Pointwise) else None

    def told_value(self, value: Held) -> Any:
        """Return JSON; None for a value that has no name."""
        return "mxfp4" if value is mxfp4.HALVES else None

    def function(self, told: Any, num_parts: int) -> Any:
        """Return the function that was told. Raises ValueError if there is none."""
        if isinstance(told, list) and told[:1] == ["mxfp4"]:
            if num_parts != mxfp4.NUM_PARTS or told[1:] not in (["bfloat16"], ["float16"], ["float32"]):
                raise ValueError("a dequantization of mxfp4 that there is not")
            return self._look_up(getattr(torch, told[1]))
        return pointwise_of(told, num_parts)

    def value(self, told: Any) -> Held:
        """Return the value that was told. Raises ValueError if there is none."""
        if told != "mxfp4":
            raise ValueError("a value without a name")
        return mxfp4.HALVES


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("no list of names")
    return values


def _place(place: Any, among: Sequence[Any]) -> int:
    if type(place) is not int or not 0 <= place < len(among):
        raise ValueError("a place that there is not")
    return place
