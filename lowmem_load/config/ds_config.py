"""Reads a ds_config, from a file or an object: untrusted input. No caller's object is ever changed."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeGuard

from lowmem_load.errors import ConfigError

MAX_FILE_NBYTES = 4 << 20
"""Bytes of a ds_config file: a thousand times a long one, and too few to cost a second or 100 MB to parse."""

MAX_DEPTH, MAX_VALUES = 64, 1 << 20
"""Nested objects and lists, and values in all. DeepSpeed's own nest 5 deep; an object within itself has no end."""

MAX_INT_BITS = 1024
"""Of an integer: as large as a float can be. Python refuses to print one of more than 4300 digits."""

_PLAIN = (str, bool, int, float, type(None))


def read_ds_config(ds_config: Mapping[str, Any] | str | os.PathLike[str] | object) -> dict[str, Any]:
    """Returns a deep copy of a ds_config as plain dicts and lists.

    Args:
        ds_config: a mapping; the path of a JSON file; a string holding JSON or url-safe base64 of JSON, as accelerate
            takes it; or an object with such a mapping as its `config` attribute (HfDeepSpeedConfig).

    Raises:
        ConfigError: it is none of these, the file cannot be read, the text is not JSON, not an object at its top level,
            or repeats a key; or it is nested too deep or within itself, or holds NaN or an integer without measure.
    """
    if isinstance(ds_config, Mapping):
        return plain_copy(ds_config)
    if isinstance(ds_config, (str, os.PathLike)):
        return plain_copy(_read_text(ds_config))
    config = getattr(ds_config, "config", None)
    if isinstance(config, Mapping):
        return plain_copy(config)
    raise ConfigError(
        f"ds_config: cannot use a {type(ds_config).__name__}; "
        "pass a dict, the path of a JSON file, or an HfDeepSpeedConfig"
    )


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage, 0 to 3, that a ds_config asks for.

    Raises:
        ConfigError: zero_optimization or its stage is absent or malformed.
    """
    example = 'write "zero_optimization": {"stage": 3}'
    if "zero_optimization" not in ds_config:
        raise ConfigError(f"ds_config has no zero_optimization: {example}")
    section = ds_config["zero_optimization"]
    if not isinstance(section, Mapping):
        raise ConfigError(f"ds_config zero_optimization: expected an object, got {section!r}; {example}")
    if "stage" not in section:
        raise ConfigError(f"ds_config zero_optimization has no stage, which DeepSpeed reads as stage 0: {example}")
    stage = section["stage"]
    if not is_int(stage) or not 0 <= stage <= 3:
        raise ConfigError(f"ds_config zero_optimization.stage: expected 0, 1, 2 or 3, got {stage!r}; {example}")
    return stage


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether the value is an integer, as True is none here."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a deep copy in which mappings of any class, also those that deepcopy refuses, are dicts.

    Raises:
        ConfigError: see `read_ds_config`.
    """
    num_values = 0

    def items(section: Mapping[str, Any], depth: int) -> dict[str, Any]:
        for key in section:
            _check_number(key, "a key")
        return {key: value(item, key, depth + 1) for key, item in section.items()}

    def value(given: Any, key: str, depth: int) -> Any:
        nonlocal num_values
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise ConfigError(
                f"ds_config {key!r}: is within itself, or more than {MAX_DEPTH} deep, or one of more than {MAX_VALUES} "
                "values; write less"
            )
        if isinstance(given, (list, tuple)):
            return [value(item, key, depth + 1) for item in given]
        _check_number(given, repr(key))
        if type(given) in _PLAIN:  # most are: Mapping looks at each class for long
            return given
        if isinstance(given, Mapping):
            return items(given, depth)
        try:
            return copy.deepcopy(given)
        except (TypeError, RecursionError) as error:
            raise ConfigError(
                f"ds_config {key!r}: a {type(given).__name__} cannot be copied ({error}); write a plain value"
            ) from error

    return items(config, 0)


def _check_number(value: object, where: str) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"ds_config {where}: is NaN; write a number")
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ConfigError(f"ds_config {where}: is an integer of {value.bit_length()} bits, at most {MAX_INT_BITS}")


def _read_text(source: str | os.PathLike[str]) -> dict[str, Any]:
    path = os.fspath(source)
    if os.path.exists(path):
        return _parse_json(_read_file(path), f"ds_config file {path}")
    if isinstance(source, str):
        if source.lstrip().startswith("{"):
            return _parse_json(source, "ds_config string")
        decoded = _decode_base64(source)
        if decoded is not None:
            return _parse_json(decoded, "ds_config base64 string")
    raise ConfigError(f"ds_config file {path}: no such file; pass the path of a JSON file, or a dict")


def _read_file(path: str) -> str:
    try:
        with open(path, "rb", opener=_without_blocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"ds_config file {path}: is not a regular file; pass the path of a JSON file")
            content = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"ds_config file {path}: cannot be read ({error.strerror}); pass the path of a JSON file"
        ) from error
    if len(content) > MAX_FILE_NBYTES:
        raise ConfigError(f"ds_config file {path}: has more than {MAX_FILE_NBYTES} bytes; is it another file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"ds_config file {path}: not UTF-8 text at byte {error.start}; save it as UTF-8 JSON"
        ) from error


def _without_blocking(path: str, flags: int) -> int:
    """Opens as `open` does, but a FIFO without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decode_base64(text: str) -> str | None:
    """Returns the JSON object that the string encodes, or None if it is something else, such as a path."""
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except ValueError:
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse_json(text: str, source: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            duplicates = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise ConfigError(f"{source}: key(s) {', '.join(duplicates)} given more than once; keep one of each")
        return unique

    try:
        config = json.loads(text, object_pairs_hook=without_duplicates)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not JSON at line {error.lineno}, column {error.colno} ({error.msg}); correct it there "
            "(comments and trailing commas are not JSON either)"
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of too many digits; objects in objects
        raise ConfigError(f"{source}: cannot be parsed: {error}; write less") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: expected an object {{...}} at top level, got {type(config).__name__}")
    return config


def comparable(value: Any) -> Any:
    """Return numbers, flags and words of a configuration, to be equal on all ranks.

    Without paths, which may be each node's own, and of objects only the class.
    """
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, str):
        return "" if os.sep in value else value
    return value if isinstance(value, bool | int | float | None) else type(value).__name__
