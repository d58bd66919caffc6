"""What any `ByteSource` must do, as tests."""

import abc
import contextlib
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files.source import ByteSource

DATA = random.Random(20240229).randbytes(300_001)
"""More than one page or packet, and no round number of them."""

NUM_THREADS = 8
NUM_READS_EACH = 50


class SourceContract(abc.ABC):
    """Tests of a byte source."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> str:
        """Store bytes under a name, as whoever publishes a new version of them would; return the path that opens it."""

    @abc.abstractmethod
    def open(self, path: str) -> ByteSource:
        """Open the source that a path names, be there one or not."""

    def test_size_and_path_are_known(self) -> None:
        """`nbytes` is that of the bytes, and `path` opens the source again."""
        for number, data in enumerate((b"", b"x", DATA)):
            with self._opened(self.put(f"size-{number}", data)) as source, self._opened(source.path) as again:
                assert source.nbytes == again.nbytes == len(data)

    def test_the_version_tells_whether_the_bytes_changed(self) -> None:
        """`version` is the same as long as the bytes are, and another for others, also as many."""
        with self._opened(self.put("version", DATA)) as source:
            with self._opened(source.path) as again:
                assert again.version == source.version
            path = self.put("version", bytes(len(DATA)))
            with self._opened(path) as other:
                assert other.nbytes == source.nbytes
                assert other.version != source.version

    def test_memory_is_filled_from_any_byte_on(self) -> None:
        """The first, some in the middle and the last bytes."""
        with self._opened(self.put("one", DATA)) as source:
            for offset, nbytes in ((0, 1), (0, len(DATA)), (4095, 2), (65_537, 100_000), (len(DATA) - 1, 1)):
                assert self._read(source, offset, nbytes) == DATA[offset : offset + nbytes], f"from byte {offset} on"

    def test_nothing_else_is_written(self) -> None:
        """Memory before and behind stays as it is."""
        with self._opened(self.put("around", DATA)) as source:
            memory = bytearray(b"\xaa" * 3000)
            source.read_into(7, memoryview(memory)[1000:2000])
            assert memory == b"\xaa" * 1000 + DATA[7:1007] + b"\xaa" * 1000

    def test_bytes_beyond_the_end_are_an_error(self) -> None:
        """Reading nothing is no error anywhere; one byte too many is a TruncatedFileError that names the path."""
        path = self.put("end", DATA)
        with self._opened(path) as source:
            for offset in (0, len(DATA), len(DATA) + 1000):
                assert self._read(source, offset, 0) == b""
            for offset, nbytes in ((len(DATA), 1), (len(DATA) - 5, 6), (0, len(DATA) + 1), (1 << 40, 1)):
                with pytest.raises(TruncatedFileError, match=re.escape(path)):
                    self._read(source, offset, nbytes)
            assert self._read(source, 0, 10) == DATA[:10], "after an error"

    def test_threads_may_read_at_the_same_time(self) -> None:
        """Each gets the bytes that it asked for."""
        start = threading.Barrier(NUM_THREADS, timeout=60)
        with self._opened(self.put("threads", DATA)) as source, ThreadPoolExecutor(NUM_THREADS) as pool:

            def wrong(seed: int) -> list[int]:
                draw = random.Random(seed)
                offsets = [draw.randrange(len(DATA) - 3000) for _ in range(NUM_READS_EACH)]
                start.wait()
                return [at for at in offsets if self._read(source, at, 3000) != DATA[at : at + 3000]]

            assert [offset for found in pool.map(wrong, range(NUM_THREADS)) for offset in found] == []

    def test_closing_again_does_nothing(self) -> None:
        """Nor does it close another source of the same path."""
        path = self.put("closed", DATA)
        with self._opened(path) as other:
            source = self.open(path)
            source.close()
            source.close()
            assert self._read(other, 0, 9) == DATA[:9]

    def test_what_is_not_there_is_a_checkpoint_error(self) -> None:
        """When it is opened; the message names the path."""
        path = self.put("lost", DATA).replace("lost", "absent")
        with pytest.raises(CheckpointError, match=re.escape("absent")):
            self.open(path)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[ByteSource]:
        source = self.open(path)
        try:
            yield source
        finally:
            source.close()

    @staticmethod
    def _read(source: ByteSource, offset: int, nbytes: int) -> bytes:
        memory = bytearray(nbytes)
        source.read_into(offset, memoryview(memory))
        return bytes(memory)
