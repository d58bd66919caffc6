"""What S3's ListObjectsV2 answers, which GCS speaks too, of a folder: all in one page."""

import os
import time
from pathlib import Path
from urllib.parse import parse_qs
from xml.sax.saxutils import escape


def listing(bucket: str, folder: Path, query: str) -> bytes:
    """The XML of the files of a folder, and of those in it."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
    contents, prefixes = [], set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = path.relative_to(folder).as_posix()
        if not key.startswith(prefix):
            continue
        first, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            prefixes.add(prefix + first + delimiter)
        else:
            contents.append(_contents(key, path.stat()))
    common = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(prefixes)]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(contents) + len(common)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(contents + common)}</ListBucketResult>"
    ).encode()


def etag(status: os.stat_result) -> str:
    """The strong ETag of a file, in its quotes, that is another once the file is."""
    return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def _contents(key: str, status: os.stat_result) -> str:
    changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified><ETag>{escape(etag(status))}</ETag>"
        f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
