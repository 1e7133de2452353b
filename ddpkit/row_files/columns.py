"""The columns of a Parquet file: of types that all rows fit to, in the order of the first row.

Neither depends on which rows came together in a batch, or on which process had them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpkit.errors import BatchError

MOST_DIGITS = 38  # of a decimal in 128 bits


@dataclass(frozen=True)
class Columns:
    """What rows need of the columns of a file.

    Attributes:
        first: the index of that of the rows whose order of entries counts: the lowest.
        order: schema of this row alone.
        types: schema that all the rows fit to.
    """

    first: int
    order: Any
    types: Any

    def joined(self, other: Columns) -> Columns:
        """Return what these and other rows need.

        Raises:
            TypeError: they have other names, or types that do not go together.
        """
        if self.first <= other.first and self.types.equals(other.types):
            return self
        if set(self.types.names) != set(other.types.names):
            raise TypeError(f"entries are {self.types.names}, and {other.types.names} elsewhere")
        import pyarrow as pa

        types = [pa.field(f.name, _joined(f, other.types)) for f in self.types]
        order = min(self, other, key=lambda columns: columns.first).order
        return Columns(min(self.first, other.first), order, pa.schema(types))

    @functools.cached_property
    def schema(self) -> Any:
        """The columns of the file, without that of the index."""
        import pyarrow as pa

        fields = []
        for column in self.order:
            kind = self.types.field(column.name).type
            fields.append(pa.field(column.name, _ordered(kind, column.type)))
        return pa.schema(fields)


def joined_type(one: Any, other: Any) -> Any:
    """Return the type that values of two types fit to, by whatever way it is come to.

    Raises:
        TypeError: there is none.
    """
    import pyarrow as pa

    if one.equals(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    kinds = pa.types
    both: list[tuple[Any, Any]] = [
        (_is_number, _joined_numbers),
        (kinds.is_decimal, _joined_decimals),
        (kinds.is_list, _joined_lists),
        (kinds.is_struct, _joined_structs),
    ]
    for is_kind, join in both:
        if is_kind(one) and is_kind(other):
            return join(one, other)
    raise TypeError(f"values are of the types {one} and {other}")


def as_schema(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema, in their order.

    Raises:
        BatchError: a value does not fit, such as an integer that no float is equal to.
    """
    if table.schema.equals(schema):
        return table
    import pyarrow as pa

    try:
        columns = [_as_field(table[column.name], column) for column in schema]
    except pa.ArrowInvalid as error:
        raise BatchError(
            f"predict_batch returned outputs that cannot be written as Parquet: {error}. One type "
            "has to hold all values of an entry: return them as one type, or as text.",
            hook="predict_batch",
        ) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _as_field(values: Any, column: Any) -> Any:
    import pyarrow as pa

    parts = [as_type(part, column.type) for part in values.chunks]
    return pa.chunked_array(parts, column.type)


def as_type(array: Any, kind: Any) -> Any:
    """Return an array with a type that its values fit to.

    Raises:
        ArrowInvalid: a value does not fit.
    """
    import pyarrow as pa

    if array.type.equals(kind):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_struct(kind):
        names = [f.name for f in array.type]
        parts = dict(zip(names, array.flatten(), strict=True))
        missing = pa.nulls(len(array))
        columns = [as_type(parts.get(f.name, missing), f.type) for f in kind]
        return pa.StructArray.from_arrays(columns, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        values = as_type(array.flatten(), kind.value_type)
        ends = np.cumsum(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        is_null = np.append(array.is_null().to_numpy(zero_copy_only=False), [False])
        offsets = pa.array(np.append([0], ends), pa.int32(), mask=is_null)
        return pa.ListArray.from_arrays(offsets, values, type=kind)
    return array.cast(kind)


def _joined(column: Any, others: Any) -> Any:
    try:
        return joined_type(column.type, others.field(column.name).type)
    except TypeError as error:
        raise TypeError(f"entry {column.name!r}: {error}") from None


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _joined_numbers(one: Any, other: Any) -> Any:
    import pyarrow as pa

    pair = (one, other)
    wider = max(pair, key=lambda kind: kind.bit_width)
    for same in (pa.types.is_floating, pa.types.is_signed_integer, pa.types.is_unsigned_integer):
        if all(map(same, pair)):
            return wider
    return pa.float64() if any(map(pa.types.is_floating, pair)) else pa.int64()


def _joined_decimals(one: Any, other: Any) -> Any:
    import pyarrow as pa

    scale = max(one.scale, other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    make = pa.decimal256 if whole + scale > MOST_DIGITS else pa.decimal128
    return make(whole + scale, scale)


def _joined_lists(one: Any, other: Any) -> Any:
    import pyarrow as pa

    return pa.list_(joined_type(one.value_type, other.value_type))


def _joined_structs(one: Any, other: Any) -> Any:
    import pyarrow as pa

    fields: dict[str, Any] = {f.name: f.type for f in one}
    for f in other:
        fields[f.name] = joined_type(fields.get(f.name, pa.null()), f.type)
    return pa.struct(list(fields.items()))


def _ordered(kind: Any, like: Any) -> Any:
    """Return a type whose inner fields stand as in another; those it lacks come last, by name."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        inner = like.value_type if pa.types.is_list(like) else pa.null()
        return pa.list_(_ordered(kind.value_type, inner))
    if not pa.types.is_struct(kind):
        return kind
    first = {f.name: f.type for f in like} if pa.types.is_struct(like) else {}
    others = {f.name for f in kind} - first.keys()
    fields = []
    for name in [*first, *sorted(others)]:
        inner = _ordered(kind.field(name).type, first.get(name, pa.null()))
        fields.append(pa.field(name, inner))
    return pa.struct(fields)
