"""The GGUF container, read strictly: every count, length and offset is held against the file before it is used.

A GGUF file is a header (magic, version, counts), key-value metadata, a table of tensors (name, dimensions, type,
offset), and the tensors' data, each at a multiple of the alignment. The specification is `docs/gguf.md` of the ggml
project; type ids and block sizes come from the `gguf` package. Its own GGUFReader is not used at run time, because it
makes several Python objects for every token of the vocabulary (4 s and 160 MB for a 98 MB model) and believes the
lengths that it reads; the tests hold this reader against it.

Nothing here allocates more than the metadata that is really in the file: numeric arrays are views of the mapping, and a
tensor's bytes are not touched at all.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from .checkpoint import WeightError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 24  # entries of one array of strings
MAX_NAME = 1 << 16  # bytes of a key or of a tensor's name
MAX_DIMENSIONS = 4

_SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in torch's order (rows first), `offset` counts from the file's start."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Container:
    """A mapped GGUF file whose header has been checked.

    `metadata` holds Python scalars and strings, lists of strings, and numpy views for numeric arrays. The mapping is
    private (copy on write): nothing that is done to it reaches the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    mapping: mmap.mmap

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes]; a view of the mapping."""
        return np.frombuffer(self.mapping, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def release(self, info: TensorInfo) -> None:
        """Let the system drop the tensor's pages from memory; they are read from the file again when touched."""
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def read_container(path: str | Path) -> Container:
    """Map a GGUF file and check its header.

    Raises:
        WeightError: the file is missing, not a GGUF, truncated, or contradicts itself.
    """
    path = Path(path)
    mapping = _map(path)
    scan = _Scan(path, mapping)
    tensor_count, metadata_count = scan.header()
    metadata = scan.metadata(metadata_count)
    table = [scan.tensor_entry(i) for i in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 30 or alignment & (alignment - 1):
        raise scan.error(f"general.alignment is {alignment!r}; it should be a power of two")
    data_start = -(-scan.position // alignment) * alignment
    tensors = {}
    for name, dims, type_id, offset in table:
        if name in tensors:
            raise scan.error(f"tensor {name!r} is listed twice")
        tensors[name] = _place(scan, name, dims, type_id, offset, data_start, alignment)
    _check_overlap(scan, tensors)
    return Container(path, metadata, tensors, mapping)


def _map(path: Path) -> mmap.mmap:
    try:
        if path.is_dir():
            raise WeightError(f"{path}: this is a folder; a .gguf file is needed")
        with path.open("rb") as file:
            head = file.read(4)
            if not head:
                raise WeightError(f"{path}: the file is empty")
            if head != MAGIC:
                raise WeightError(f"{path}: not a GGUF file (it starts with {head!r}, which should be {MAGIC!r})")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise WeightError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as problem:
        if isinstance(problem, WeightError):
            raise
        raise WeightError(f"{path}: cannot be read ({problem})") from None


class _Scan:
    """A position in the header that cannot leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def error(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: {what}")

    def need(self, nbytes: int, what: str) -> int:
        """The current position, after moving past `nbytes` more that must be in the file."""
        start = self.position
        if nbytes > self.size - start:
            raise self.error(
                f"{what} needs {nbytes} bytes at offset {start} of {self.size}; the file is truncated or damaged"
            )
        self.position = start + nbytes
        return start

    def scalar(self, kind: int, what: str) -> Any:
        layout = _SCALARS[kind]
        return layout.unpack_from(self.data, self.need(layout.size, what))[0]

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.scalar(GGUFValueType.UINT64, f"the length of {what}")
        if limit is not None and length > limit:
            raise self.error(f"{what} is {length} bytes long, more than the {limit} allowed; the file is damaged")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not valid UTF-8") from None

    def header(self) -> tuple[int, int]:
        """The number of tensors and of metadata entries."""
        self.need(len(MAGIC), "the magic number")
        version = self.scalar(GGUFValueType.UINT32, "the version")
        if version not in VERSIONS:
            if version and not version & 0xFFFF:
                raise self.error("the file is in big-endian byte order, which is not supported")
            raise self.error(f"GGUF version {version} is not supported; it should be one of {VERSIONS}")
        tensors = self.scalar(GGUFValueType.UINT64, "the tensor count")
        entries = self.scalar(GGUFValueType.UINT64, "the metadata count")
        for count, limit, what in ((tensors, MAX_TENSORS, "tensors"), (entries, MAX_METADATA, "metadata entries")):
            if count > limit:
                raise self.error(
                    f"the header counts {count} {what}, more than the {limit} allowed; the file is damaged"
                )
        return tensors, entries

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(count):
            key = self.string(f"the key of metadata entry {i}", MAX_NAME)
            label = _shown(key)
            if key in found:
                raise self.error(f"metadata {label} is given twice")
            kind = self.scalar(GGUFValueType.UINT32, f"the type of metadata {label}")
            found[key] = self.value(kind, f"metadata {label}")
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(kind, what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        raise self.error(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> Any:
        kind = self.scalar(GGUFValueType.UINT32, f"the element type of {what}")
        count = self.scalar(GGUFValueType.UINT64, f"the length of {what}")
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            start = self.need(count * layout.size, what)
            return np.frombuffer(self.data, dtype=np.dtype(layout.format), count=count, offset=start)
        if kind == GGUFValueType.STRING:
            if count > MAX_STRINGS:
                raise self.error(
                    f"{what} counts {count} strings, more than the {MAX_STRINGS} allowed; the file is damaged"
                )
            return self.strings(count, what)
        raise self.error(f"{what} is an array of the unsupported type {kind}")

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings. Written out flat: a vocabulary has hundreds of thousands."""
        if count * _LENGTH.size > self.size - self.position:
            self.need(count * _LENGTH.size, what)
        found = []
        data, size, position, unpack = self.data, self.size, self.position, _LENGTH.unpack_from
        for i in range(count):
            start = position + 8
            if start > size:
                self.position = position
                self.need(8, f"string {i} of {what}")
            (length,) = unpack(data, position)
            position = start + length
            if position > size:
                self.position = start
                self.need(length, f"string {i} of {what}")
            try:
                found.append(data[start:position].decode("utf-8"))
            except UnicodeDecodeError:
                raise self.error(f"string {i} of {what} is not valid UTF-8") from None
        self.position = position
        return found

    def tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions (the contiguous one first), type id and offset within the data section."""
        name = self.string(f"the name of tensor {index}", MAX_NAME)
        label = f"tensor {_shown(name)}"
        rank = self.scalar(GGUFValueType.UINT32, f"the dimension count of {label}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.error(f"{label} has {rank} dimensions; it should have 1 to {MAX_DIMENSIONS}")
        dims = tuple(self.scalar(GGUFValueType.UINT64, f"the dimensions of {label}") for _ in range(rank))
        type_id = self.scalar(GGUFValueType.UINT32, f"the type of {label}")
        return name, dims, type_id, self.scalar(GGUFValueType.UINT64, f"the offset of {label}")


def _place(
    scan: _Scan, name: str, dims: tuple[int, ...], type_id: int, offset: int, data_start: int, alignment: int
) -> TensorInfo:
    """Where a tensor lies, once its type, its dimensions and its place in the file have been checked."""
    label = f"tensor {_shown(name)}"
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise scan.error(f"{label} has the unknown type {type_id}") from None
    if 0 in dims:
        raise scan.error(f"{label} has the shape {dims[::-1]}; no dimension should be 0")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block_size:
        raise scan.error(
            f"{label} has rows of {dims[0]}, which is not a multiple of the {kind.name} block of {block_size}"
        )
    nbytes = dims[0] // block_size * block_bytes
    for extent in dims[1:]:
        nbytes *= extent
    if offset % alignment:
        raise scan.error(f"{label} starts at {offset}, which is not a multiple of the alignment {alignment}")
    start = data_start + offset
    if start + nbytes > scan.size:
        raise scan.error(
            f"{label} of shape {dims[::-1]} ({kind.name}) needs bytes {start} to {start + nbytes}, and the file has "
            f"{scan.size}; it is truncated or damaged"
        )
    return TensorInfo(name, kind, dims[::-1], start, nbytes)


def _check_overlap(scan: _Scan, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for left, right in itertools.pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise scan.error(f"tensors {_shown(left.name)} and {_shown(right.name)} overlap; the file is damaged")


def _shown(name: str) -> str:
    """A name from the file as it may stand in a one-line message."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
