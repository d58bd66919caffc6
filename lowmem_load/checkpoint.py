"""Opens shard files: headers only, each file once, nothing mapped."""

from __future__ import annotations

import os

from .errors import CheckpointError
from .expression import Source
from .header import PREFIX_NBYTES, Header, header_nbytes, parse_header


def read_header(path: str) -> Header:
    """Read and validate the header of the safetensors file at `path`.

    Raises:
        CheckpointError: the file cannot be opened.
        HeaderError: the header is malformed.
        TruncatedFileError: the file is shorter than its header promises.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            nbytes = header_nbytes(file.read(PREFIX_NBYTES), path, file_nbytes)
            return parse_header(_read_fully(file.fileno(), nbytes), path, file_nbytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def source(path: str, header: Header, name: str) -> Source:
    """Return tensor `name` of the file at `path` as a leaf of expressions."""
    entry = header.tensors[name]
    return Source(path, name, entry.start, entry.shape, entry.dtype)


def _read_fully(descriptor: int, nbytes: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < nbytes:
        piece = os.pread(descriptor, nbytes - len(pieces), PREFIX_NBYTES + len(pieces))
        if not piece:
            break
        pieces += piece
    return bytes(pieces)
