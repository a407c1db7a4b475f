"""Uploads on their way to the store: a multipart body is parsed and written part by part, within limits.

A body of 200 MB never is in memory: what has come is written as soon as there is a piece of it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headway.config import Batches
from headway.errors import RequestError
from headway.gateway.parsing.fields import parse_as
from headway.store.batches.records import no_room

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

ROOM = 2**16  # bytes of a body that are not the file's
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = {"purpose", "file", _ANCHOR, _SECONDS}
_LONGEST = 255  # bytes of a file's name, and characters of a field


class ExpiresAfter(BaseModel):
    """When a file expires: an hour to 30 days after it was created."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


@dataclass(slots=True)
class Quota:
    """The bytes that a tenant's files may have, uploads of this gateway included.

    uploading: bytes of unfinished uploads, by tenant.
    """

    most: int
    uploading: Counter[str] = field(default_factory=Counter)

    def check(self, tenant: str, used: int, size: int = 0) -> None:
        """Raise RequestError (413) when `size` more bytes are too many. used: by complete files."""
        if used + self.uploading[tenant] + size > self.most:
            raise no_room(self.most)

    def add(self, tenant: str, size: int) -> None:
        """Count bytes of an upload, or give them back."""
        self.uploading[tenant] += size
        if not self.uploading[tenant]:
            del self.uploading[tenant]


class Upload:
    """A multipart body with the fields `purpose` and `file`, parsed as it comes.

    size, lines: of the file so far. pending: what of it waits to be written.
    Raises RequestError for a content type that is no such body.
    """

    def __init__(self, content_type: str, limits: Batches) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise RequestError(
                f"The content type is {content_type[:64]!r}.",
                "Send multipart/form-data with the fields purpose and file.",
                code="invalid_form",
            )
        calls: MultipartCallbacks = {
            "on_part_begin": self._part,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }
        self._parser = self._parser_of(options[b"boundary"], calls)
        self._limits = limits
        self._header, self._value, self._disposition = b"", b"", b""
        self._field = ""  # that is being read
        self._texts = dict[str, bytes]()
        self._whole = False
        self._tail = False  # the file does not end with a line's end
        self.name = ""
        self.expires_s: int | None = None  # seconds after which the file expires
        self.size = self.lines = 0
        self.pending = bytearray()

    @staticmethod
    def _parser_of(boundary: bytes, calls: MultipartCallbacks) -> MultipartParser:
        try:
            return MultipartParser(boundary, calls)
        except FormParserError as error:
            raise _not_a_form(error) from error

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; RequestError: 413 as soon as the file is too large, 400 for a malformed one."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _not_a_form(error) from error

    def take(self) -> bytes:
        """Return the bytes of the file that wait to be written, and forget them."""
        taken = bytes(self.pending)
        self.pending.clear()
        return taken

    def complete(self) -> None:
        """Raise RequestError unless the whole body has come and has what it needs."""
        if not self._whole:
            raise _not_a_form("it ends too early")
        purpose = self._texts.get("purpose", b"").decode(errors="replace")
        if purpose != "batch":
            raise RequestError(
                f"The purpose is {purpose[:64]!r}.",
                'Send purpose "batch": files are for batches only here.',
                param="purpose",
                code="invalid_purpose",
            )
        if "file" not in self._texts:
            raise RequestError("The form has no file.", "Send the field file.", param="file")
        if _ANCHOR in self._texts or _SECONDS in self._texts:
            anchor, seconds = (self._texts.get(name, b"").decode(errors="replace") for name in (_ANCHOR, _SECONDS))
            self.expires_s = parse_as(ExpiresAfter, {"anchor": anchor, "seconds": seconds}).seconds

    # ---- the parser's callbacks

    def _part(self) -> None:
        self._disposition, self._field = b"", ""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name not in _FIELDS:
            raise RequestError(
                f"The form has a field {name[:64]!r}.",
                "Send purpose, file and, to have it deleted later, expires_after.",
                param=name[:64],
            )
        if name in self._texts:
            raise RequestError(f"The form has the field {name} twice.", "Send it once.", param=name)
        self._field, self._texts[name] = name, b""
        if name == "file":
            path = options.get(b"filename", b"")[-_LONGEST:].decode(errors="replace")
            self.name = path.replace("\\", "/").rsplit("/", 1)[-1] or "file.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = data[start:end]
        if self._field == "file":
            self._add(part)
        elif len(self._texts[self._field]) + len(part) > _LONGEST:
            raise RequestError(f"The field {self._field} is too long.", "See /docs.", param=self._field)
        else:
            self._texts[self._field] += part

    def _add(self, part: bytes) -> None:
        if not part:
            return
        self.size += len(part)
        self.lines += part.count(b"\n")
        self._tail = not part.endswith(b"\n")
        if self.size > self._limits.max_file_mib * 2**20:
            raise too_large(self._limits.max_file_mib)
        if self.lines + self._tail > self._limits.max_lines:
            raise RequestError(
                f"The file has more than {self._limits.max_lines:,} lines (batches.max_lines).",
                "Make several batches of it.",
                param="file",
                status=413,
                code="too_many_lines",
                headers={"connection": "close"},
            )
        self.pending += part

    def _end(self) -> None:
        self._whole = True


def too_large(mib: int) -> RequestError:
    """Return the error of a file beyond the limit (413)."""
    return RequestError(
        f"The file has more than {mib} MiB (batches.max_file_mib).",
        "Make several batches of it.",
        param="file",
        status=413,
        code="file_too_large",
        headers={"connection": "close"},
    )


def _not_a_form(why: object) -> RequestError:
    return RequestError(
        f"The body is not a multipart form: {str(why)[:200]}.",
        "Send multipart/form-data with the fields purpose and file.",
        code="invalid_form",
        headers={"connection": "close"},
    )


def new_id(kind: str) -> str:
    """Return a new id: "file" or "batch", and what cannot be guessed."""
    return f"{kind}-{secrets.token_hex(12)}" if kind == "file" else f"{kind}_{secrets.token_hex(12)}"
