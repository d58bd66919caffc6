"""What any implementation of a seam must do, as tests: subclass a contract, say how yours is made, let pytest run it.

    class TestMine(SourceContract):
        def put(self, name: str, data: bytes) -> str: ...
        def open(self, path: str) -> ByteSource: ...

Nothing here needs pytest. With it, `pytest.register_assert_rewrite("lowmem_load.testing")` before the import makes
failures name the values.
"""
