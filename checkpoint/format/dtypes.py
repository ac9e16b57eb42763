"""Element types by torch's names: bytes per element, and the name in safetensors, if any.

A name that is not listed is refused. Reading a snapshot does not need torch.
"""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """Bytes per element and the name in safetensors. A type without a name is declared as ``U8``."""

    nbytes: int
    safetensors: str | None = None


DTYPES: dict[str, DType] = {
    "bool": DType(1, "BOOL"),
    "uint8": DType(1, "U8"),
    "int8": DType(1, "I8"),
    "uint16": DType(2, "U16"),
    "int16": DType(2, "I16"),
    "uint32": DType(4, "U32"),
    "int32": DType(4, "I32"),
    "uint64": DType(8, "U64"),
    "int64": DType(8, "I64"),
    "float16": DType(2, "F16"),
    "bfloat16": DType(2, "BF16"),
    "float32": DType(4, "F32"),
    "float64": DType(8, "F64"),
    "float8_e4m3fn": DType(1, "F8_E4M3"),
    "float8_e5m2": DType(1, "F8_E5M2"),
    "float8_e4m3fnuz": DType(1),
    "float8_e5m2fnuz": DType(1),
    "float8_e8m0fnu": DType(1),
    "float4_e2m1fn_x2": DType(1),
    "complex32": DType(4),
    "complex64": DType(8),
    "complex128": DType(16),
    "qint8": DType(1),
    "quint8": DType(1),
    "qint32": DType(4),
    "quint4x2": DType(1),
    "quint2x4": DType(1),
    "bits8": DType(1),
    "bits16": DType(2),
    "bits1x8": DType(1),
    "bits2x4": DType(1),
    "bits4x2": DType(1),
    **{f"{sign}int{bits}": DType(1) for sign in ("", "u") for bits in range(1, 8)},
}
