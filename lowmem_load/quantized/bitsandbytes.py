"""bitsandbytes: describes 4-bit weights. Written for bitsandbytes 0.48.2 to 0.50.2.

A weight that is packed in the file is read by ranges. Any other is packed by ranges, because each block depends on its
own weights alone. Its scales are full on every rank, and double quantization subtracts the mean of all of them.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowmem_load import foreign_names
from lowmem_load.errors import CheckpointError, IncompatibleVersionError, UnsupportedError, listed
from lowmem_load.foreign_names import BITSANDBYTES, check_release
from lowmem_load.planning.expression import Elementwise
from lowmem_load.quantized.format import (
    Kinds,
    Packing,
    QuantizedFormat,
    QuantizedTensor,
    fields_of,
    method_of,
    packed_parameters,
    packing_of,
)
from lowmem_load.replaced import Handlers
from lowmem_load.symbolic.lazy import LazyTensor
from lowmem_load.symbolic.tensor import SymbolicTensor

_NESTED_BLOCK = 256
"""Number of scales that share a scale under double quantization: bitsandbytes 0.50.2 `functional.py`."""
_CODES, _NESTED_CODES = 16, 256
"""Entries of the code books of 4-bit values and of 8-bit scales."""

STORAGE = "bnb_4bit_quant_storage"

_SCALES, _STATE = "scales", "state"
"""Names of the scales in fp32 before they are quantized, and of the quantization state that has them."""


class BitsAndBytes4Bit(QuantizedFormat):
    """bitsandbytes in 4 bits. In 8 bits it is refused, as every format that is not known."""

    method = "bitsandbytes"
    stays_packed = True

    def recognizes(self, quantization: Any) -> bool:
        """See `QuantizedFormat`."""
        if method_of(quantization, self.method) != self.method:  # config.json of old checkpoints has none
            return False
        return any(fields_of(quantization).get(key) for key in ("load_in_4bit", "_load_in_4bit"))  # a property there

    def handlers(self) -> Handlers:
        """Return the handlers by which bitsandbytes packs described weights."""
        if importlib.util.find_spec("bitsandbytes") is None:  # transformers is about to say so
            return {}
        try:
            check_release(BITSANDBYTES)
        except IncompatibleVersionError as error:
            raise UnsupportedError(str(error)) from error
        return {
            foreign_names.NEW_PARAMS_4BIT: _of_weight,
            foreign_names.PACKED_PARAMS_4BIT: _of_packed,
            foreign_names.WARM_UP: lambda *_, **__: None,  # the model stays where it is
        }

    def check(self, name: str, model: nn.Module) -> None:
        """See `QuantizedFormat`."""
        if unpacked := [f"{prefix}.weight" for prefix, module in _linears(model) if packing_of(module.weight) is None]:
            raise CheckpointError(
                f"{name}: {listed(unpacked)} are to have 4 bits, but the files have no values for them, or packed ones "
                "without their quantization state. Save the checkpoint again, with all of its tensors"
            )
        for weight, parameter in packed_parameters(model).items():
            if parameter.packing.problem is not None:
                raise UnsupportedError(f"{weight}: {parameter.packing.problem}")

    def pack_skeleton(self, model: nn.Module) -> None:
        """See `QuantizedFormat`."""
        for name, module in _linears(model):
            if not isinstance(module.weight, _package().nn.Params4bit):
                raise UnsupportedError(
                    f"{name}.weight: was sharded before it is packed in 4 bits; pass a DeviceMesh, not a "
                    "DistributedConfig"
                )
            storage: torch.dtype = module.quant_storage
            num_elements = -(-module.out_features * module.in_features // (2 * storage.itemsize))
            packed = torch.empty(num_elements, 1, dtype=storage, device="meta")
            module.weight = nn.Parameter(packed, requires_grad=False)

    def hand_over(self, loaded: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Give 4-bit modules the quantization states of the loaded ones."""
        for name, module in _linears(loaded):
            own: Any = modules.get(name)
            if own is not None and module.quant_state is not None:
                own.quant_state = module.quant_state
                own.quant_state.to(next(own.parameters()).device)


def _package() -> Any:
    return importlib.import_module("bitsandbytes")


def _linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules whose weights have 4 bits."""
    kind = _package().nn.Linear4bit
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def _of_weight(ordinary: Callable[..., Any], cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `Params4bit.__new__`."""
    if not isinstance(data, SymbolicTensor):
        return ordinary(cls, data, *args, **kwargs)
    template = ordinary(cls, torch.empty(0, dtype=data.dtype), *args, **kwargs)  # has the defaults
    double = bool(template.compress_statistics)
    storage: torch.dtype = template.quant_storage
    num_bytes = -(-data.numel() // 2)
    problem = None
    if num_bytes % storage.itemsize:
        problem = (
            f"has the shape {tuple(data.shape)}, and so {num_bytes} bytes in 4 bits, which {STORAGE} {storage} does "
            "not divide; use torch.uint8, or leave its module out (llm_int8_skip_modules)"
        )
    shape, dtype, blocksize = data.shape, data.dtype, int(template.blocksize)

    def pack(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return _quantize(inputs[0], template)[0].view(-1).view(storage)

    def scale(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        absmax: torch.Tensor = _quantize(inputs[0], template)[1].absmax
        return absmax.cpu()  # from where it is sent to all ranks

    def combine(read: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {_STATE: _state(read[_SCALES], shape, dtype, template)}

    def restore(name: str, made: nn.Parameter, read: Mapping[str, Any], device: torch.device) -> None:
        state = read[_STATE]
        if _tensors_of(state) != expected:
            raise IncompatibleVersionError(
                f"{name}: bitsandbytes made {_tensors_of(state)} next to the packed values, the plan has {expected}"
            )
        _become(made, {**vars(template), "quant_state": state, "bnb_quantized": True}, device)

    expected = _statistics(data.numel(), blocksize, double=double)
    method = f"bitsandbytes {template.quant_type}, blocks of {blocksize}{', scales quantized' * double}"
    weight, num_blocks = (data.expression,), -(-data.numel() // blocksize)
    group = blocksize // 2 // storage.itemsize
    packed = Elementwise(method, pack, weight, (num_bytes // storage.itemsize, 1), storage, group, blocksize)
    scales = Elementwise(f"scales of {method}", scale, weight, (num_blocks,), torch.float32, 1, blocksize)
    packing = Packing(method, {}, restore, {_SCALES: scales}, combine, expected, problem, STORAGE)
    return QuantizedTensor.of(data, packed, packing, **vars(template))


def _quantize(weights: torch.Tensor, settings: Any) -> tuple[torch.Tensor, Any]:
    """Return the packed bytes of blocks, and their quantization state, with scales in fp32."""
    # Where an ordinary load packs: transformers' `update_device_map`.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    quantized: tuple[torch.Tensor, Any] = _package().functional.quantize_4bit(
        weights.to(device), blocksize=settings.blocksize, quant_type=settings.quant_type
    )
    return quantized


def _state(scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype, settings: Any) -> Any:
    """Return the quantization state of a weight with these scales, as `quantize_4bit` makes it."""
    state = _quantize(torch.zeros(settings.blocksize, dtype=dtype), settings)[1]
    state.shape, state.absmax = shape, scales.to(state.absmax.device)
    if settings.compress_statistics:
        quantize, state.offset = _package().functional.quantize_blockwise, state.absmax.mean()
        state.absmax, state.state2 = quantize(state.absmax - state.offset, blocksize=_NESTED_BLOCK)
        state.nested = True
    return state


def _of_packed(
    ordinary: Callable[..., Any],
    cls: Any,
    data: Any,
    quantized_stats: Mapping[str, Any],
    requires_grad: bool = False,
    device: Any = "cuda",
    module: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand in for `Params4bit.from_prequantized`."""
    if not isinstance(data, SymbolicTensor):
        return ordinary(cls, data, quantized_stats, requires_grad, device, module, *args, **kwargs)
    companions = {key: value.expression for key, value in quantized_stats.items()}

    def restore(name: str, made: nn.Parameter, read: Mapping[str, Any], device: torch.device) -> None:
        empty = torch.empty(0, dtype=data.dtype)
        try:
            template = ordinary(cls, empty, dict(read), device=torch.device("cpu"), module=None)
            _check_statistics(template.quant_state, data, module)
        except Exception as error:  # bitsandbytes trusts the values, so a wrong one may raise anything
            raise CheckpointError(f"{name}: no usable quantization state: {type(error).__name__}: {error}") from error
        _become(made, {**vars(template), "module": module}, device)

    kinds = [key.rpartition("__")[2] for key in companions if "bitsandbytes__" in key]
    method = f"bitsandbytes {''.join(kinds)}, packed in the file"
    attributes = {
        "quant_type": "".join(kinds),
        "compress_statistics": any(key.endswith("nested_absmax") for key in companions),
        "quant_storage": data.dtype,
        "module": module,
    }
    packing = Packing(method, companions, restore, storage_option=STORAGE)
    return QuantizedTensor.of(data, data.expression, packing, **attributes)


def _become(made: nn.Parameter, attributes: Mapping[str, Any], device: torch.device) -> None:
    if type(made) is nn.Parameter or isinstance(made, LazyTensor):  # a DTensor stays one: its module has the state
        # In place: DeepSpeed's methods are bound to the object.
        _pose(made, _package().nn.Params4bit, attributes)
    state, module = attributes["quant_state"], attributes["module"]
    state.to(device)
    if module is not None:
        module.quant_state = state


def _check_statistics(state: Any, packed: torch.Tensor, module: Any) -> None:
    """Raise ValueError for statistics that do not fit: bitsandbytes' kernels would read past a short tensor."""
    shape = tuple(state.shape or ())
    wanted = None if module is None else (module.out_features, module.in_features)
    if wanted is not None and shape != wanted:
        raise ValueError(f"it is that of a weight of shape {shape}, the module has one of shape {wanted}")
    num_bytes = packed.numel() * packed.dtype.itemsize
    if num_bytes != -(-math.prod(shape) // 2):
        raise ValueError(f"{num_bytes} packed bytes for a weight of shape {shape}")
    expected = _statistics(math.prod(shape), state.blocksize, double=state.nested)
    if _tensors_of(state) != expected:
        raise ValueError(f"it has {_tensors_of(state)}, a weight of shape {shape} needs {expected}")
    if state.nested and state.state2.blocksize != _NESTED_BLOCK:
        raise ValueError(f"scales quantized in blocks of {state.state2.blocksize}; bitsandbytes has {_NESTED_BLOCK}")


def _statistics(num_elements: int, blocksize: int, *, double: bool) -> Kinds:
    blocks = -(-num_elements // blocksize)
    kinds: Kinds = {
        "absmax": ((blocks,), torch.uint8 if double else torch.float32),
        "quant_map": ((_CODES,), torch.float32),
    }
    if double:
        kinds["nested_absmax"] = (-(-blocks // _NESTED_BLOCK),), torch.float32
        kinds["nested_quant_map"] = (_NESTED_CODES,), torch.float32
    return kinds


def _tensors_of(state: Any) -> Kinds:
    return {
        key: (tuple(value.shape), value.dtype)
        for key, value in state.as_dict().items()
        if isinstance(value, torch.Tensor)
    }


class _PosingTensor(LazyTensor):
    """A lazy parameter of packed values. Code that asks for its class sees `kind`, which it has once it is read."""

    kind: type

    @property
    def __class__(self) -> Any:
        return self.kind

    @__class__.setter
    def __class__(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Move the state that goes with the values, too, as the class does."""
        moved: torch.Tensor = LazyTensor.to(self, *args, **kwargs)
        if not moved.is_meta:
            self.quant_state.to(moved.device)
        return moved

    def hand_on(self, made: torch.Tensor, attributes: Mapping[str, Any]) -> None:
        """Have a parameter be of the class, too."""
        if isinstance(made, nn.Parameter):
            _pose(made, self.kind, attributes)
        else:
            LazyTensor.hand_on(self, made, attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = LazyTensor.__deepcopy__(self, memo)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


def _pose(parameter: torch.Tensor, kind: type, attributes: Mapping[str, Any]) -> None:
    """Have a parameter of packed values be of a class; a lazy one says so, and is once it is read."""
    vars(parameter).update(attributes)
    if isinstance(parameter, LazyTensor):
        parameter.__class__ = _PosingTensor
        vars(parameter)["kind"] = kind
    else:
        parameter.__class__ = kind
