"""The objects of one folder of a store: every request that ddpkit makes is a method here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ddpkit.errors import ObjectStoreError
from ddpkit.object_store.failures import codes_of, explained
from ddpkit.object_store.filesystem import NOTHING, kind_of, open_filesystem
from ddpkit.object_store.limits import limited
from ddpkit.object_store.repetition import repeated
from ddpkit.object_store.url import joined, shown_url

T = TypeVar("T")


class ShortReadError(EOFError):
    """A store has given fewer bytes than were asked for."""


class Objects:
    """The objects of one folder of a store.

    An object is written whole or not at all, and is then what every reader gets by its name: that
    is what stores promise. A listing may be late; no method but :meth:`sizes` uses one.

    Args:
        url: of the folder; it need not be there, its bucket must.
        storage_options: for the filesystem of fsspec. Never logged.

    Attributes:
        url: as given, without a password.

    Raises:
        MissingExtraError: a package is missing; the message names it.
        ConfigError: no filesystem has this protocol.

    Ranks: local.

    Example:
        >>> objects = Objects("memory://bucket/run")
        >>> objects.write("a", b"123")
        >>> objects.size("a"), objects.read("a"), objects.size("b")
        (3, b'123', None)
        >>> objects.delete("a")
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] = NOTHING) -> None:
        self.url = shown_url(url)
        self.kind = kind_of(url)
        self._given = url, storage_options
        self._filesystem, self._folder = open_filesystem(url, storage_options)

    @property
    def place(self) -> Hashable:
        """The folder, the same for every way to write its URL."""
        return self._filesystem, self._folder

    def inside(self, name: str) -> Objects:
        """Return the objects of a folder in this one."""
        url, options = self._given
        return Objects(joined(url, name), options)

    # ------------------------------------------------------------------------------------- reading

    def read(self, name: str) -> bytes:
        """Return an object's content, for small ones.

        Raises:
            FileNotFoundError: there is no such object.
            ObjectStoreError: the store cannot be asked.
        """

        def request() -> bytes:
            return bytes(self._limited(self._filesystem.cat_file, self._path(name)))

        return self._ask(f"read {name}", request)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return some bytes of an object.

        Raises:
            FileNotFoundError: there is no such object.
            ObjectStoreError: the store cannot be asked, or gives fewer bytes each time.
        """

        def request() -> bytes:
            read = self._filesystem.cat_file
            asked = end - start
            data = self._limited(read, self._path(name), size=asked, start=start, end=end)
            if len(data) != asked:
                raise ShortReadError(f"{len(data)} bytes instead of {asked}")
            return bytes(data)

        return self._ask(f"read bytes {start} to {end} of {name}", request)

    def size(self, name: str) -> int | None:
        """Return an object's size in bytes; None where there is none.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """

        def request() -> int | None:
            self._filesystem.invalidate_cache()
            try:
                found = self._limited(self._filesystem.info, self._path(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

        return self._ask(f"look for {name}", request)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """List the objects whose name begins with ``prefix``, a folder's name or empty.

        A store may list an object late, or one that is gone. Objects that stand for folders, which
        consoles of stores make, are left out.

        Returns:
            Their sizes in bytes, by name in this folder.

        Raises:
            ObjectStoreError: the store cannot be asked, or has no such bucket.
        """

        def request() -> dict[str, int]:
            self._filesystem.invalidate_cache()
            path = self._path(prefix) if prefix else self._folder
            try:
                found = self._limited(self._filesystem.find, path, detail=True)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise explained(self.url, "list it", error) from error
                return {}
            sizes = {self._name(path): int(entry["size"]) for path, entry in found.items()}
            return {name: size for name, size in sizes.items() if not self._is_placeholder(name)}

        return self._ask(f"list {prefix or 'it'}", request)

    # ------------------------------------------------------------------------------------- writing

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, in the place of an earlier one.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """

        def request() -> None:
            self._limited(self._filesystem.pipe_file, self._path(name), data, size=len(data))

        self._change(f"write {name}", request)

    def create(self, name: str, data: bytes) -> None:
        """Write a small object if there is none of this name; a store with ``kind.creates`` decides
        it for all that try at once.

        Raises:
            FileExistsError: there is one; perhaps of an attempt whose answer was lost.
            ObjectStoreError: the store cannot be asked.
        """

        def request() -> None:
            try:
                self._limited(self._filesystem.pipe_file, self._path(name), data, mode="create")
            except OSError as error:
                if is_refused_condition(error):
                    raise FileExistsError(name) from error
                raise

        self._change(f"create {name}", request)

    def send(self, path: Path, name: str) -> None:
        """Copy a file of a disk up, in the place of an earlier object.

        Raises:
            ObjectStoreError: the store cannot be asked, or has another size of it.
        """
        size = path.stat().st_size

        def request() -> None:
            options = self.kind.send_options(size)
            put = self._filesystem.put_file
            self._limited(put, str(path), self._path(name), size=size, **options)

        self._change(f"write {name} of {size} bytes", request)
        found = self.size(name)
        if found != size:
            raise ObjectStoreError(
                f"{self.url}: {name} has {found} bytes there, and {size} on this disk."
            )

    def delete(self, name: str) -> None:
        """Delete an object; one that is gone is no error.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """

        def request() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._limited(self._filesystem.rm_file, self._path(name))

        self._change(f"delete {name}", request)

    def unfinished(self) -> list[tuple[str, str]]:
        """Return what stores keep of uploads that did not end: the object's name, and the upload.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """
        if not self.kind.parts_stay:
            return []
        bucket, key, _ = self._filesystem.split_path(f"{self._folder}/")

        def request() -> list[tuple[str, str]]:
            found = self._limited(
                self._filesystem.call_s3,
                "list_multipart_uploads",
                Bucket=bucket,
                Prefix=key,
            )
            uploads = found.get("Uploads", [])
            return [(each["Key"].removeprefix(key), each["UploadId"]) for each in uploads]

        return self._ask("list the uploads that did not end", request)

    def abort(self, name: str, upload: str) -> None:
        """Have a store forget an upload; one that has ended meanwhile is no error.

        Raises:
            ObjectStoreError: the store cannot be asked.
        """
        bucket, key, _ = self._filesystem.split_path(self._path(name))

        def request() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._limited(self._filesystem.abort_mpu, bucket, key, upload)

        self._change(f"end the upload of {name}", request)

    # ------------------------------------------------------------------------------------ requests

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _name(self, path: str) -> str:
        return str(path).removeprefix(f"{self._folder}/")

    def _is_placeholder(self, name: str) -> bool:
        """Return whether an object only stands for a folder, as consoles of stores make them."""
        return not name or name.endswith("/") or name == self._folder

    def _limited(
        self,
        request: Callable[..., T],
        *arguments: object,
        size: int = 0,
        **options: Any,
    ) -> T:
        return limited(self._filesystem, request, *arguments, size=size, **options)

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        return repeated(request, self.url, doing)

    def _change(self, doing: str, request: Callable[[], object]) -> None:
        try:
            repeated(request, self.url, doing)
        except FileNotFoundError as error:  # of the bucket
            raise explained(self.url, doing, error) from error


def is_refused_condition(error: BaseException) -> bool:
    """Say whether a store has refused to make an object that is there."""
    return bool(codes_of(error) & {"PreconditionFailed", "412"})


def is_missing_bucket(error: BaseException) -> bool:
    """Say whether a store has no such bucket, and not only no such object."""
    return "NoSuchBucket" in codes_of(error)
