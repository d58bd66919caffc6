"""`lowmem-load digest`: one digest of a model, or which tensors of two differ."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from lowmem_load.cli import options
from lowmem_load.cli.output import NO, print_all, print_json, working
from lowmem_load.quantities import duration
from lowmem_load.tables import facts, table


def digest(
    name: options.Name,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second checkpoint, to compare with.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters, such as bfloat16; auto: as the config says.")] = "auto",
    key: Annotated[str, typer.Option(help="As `model_digest` takes it.")] = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor, too.")] = False,
    subfolder: options.Subfolder = "",
    revision: options.Revision = None,
    auto_class: options.AutoClass = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dequantize: options.Dequantize = False,
    as_json: options.Json = False,
) -> None:
    """Print the digest of a model, or what differs between two.

    It is what `lowmem_load.model_digest` gives once the checkpoint is loaded, on any ranks.

    One parameter is in memory at a time. With OTHER, exits with 1 if the two differ, and names the tensors.

    \b
    lowmem-load digest /models/Llama-3.1-8B --dtype bfloat16
    lowmem-load digest out/step-1000 out/step-1000-consolidated
    """
    with working():
        from lowmem_load.hf.quantizers import dequantizing
        from lowmem_load.load.digest import digest_checkpoint

        found: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for each in dict.fromkeys([name] if other is None else [name, other]):
            start = time.perf_counter()
            keywords: dict[str, Any] = {"trust_remote_code": trust_remote_code, "subfolder": subfolder}
            if revision is not None:
                keywords["revision"] = revision
            if dequantize:
                keywords["quantization_config"] = dequantizing(each, keywords)
            found[each] = digest_checkpoint(each, dtype=dtype, key=key, auto_class=auto_class, **keywords)
            seconds[each] = time.perf_counter() - start
    first, last = found[name], found[other or name]
    differing = first.differences(last)
    if as_json:
        digests = {each: {"digest": str(it), "tensors": it.tensors} for each, it in found.items()}
        print_json({"digests": digests, "differing": differing, "seconds": seconds})
    else:
        parts: list[Any] = [
            facts(
                "",
                {each: f"{it}  ({len(it.tensors)} tensors, {duration(seconds[each])})" for each, it in found.items()},
            )
        ]
        if tensors:
            parts.append(table("Tensors", ("name", "digest"), sorted(first.tensors.items())))
        if other is not None:
            parts.append("equal" if not differing else f"{len(differing)} tensors differ: {', '.join(differing[:20])}")
        print_all(parts)
    if differing:
        raise typer.Exit(NO)
