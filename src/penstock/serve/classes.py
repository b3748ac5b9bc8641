"""Image classification over HTTP: one image per microbatch."""

import asyncio
import time
from email.message import Message
from math import prod
from typing import Any

from torch import Tensor

from penstock.errors import DataError, RunError
from penstock.recipes.classify import as_input, best_classes, class_scores, confidences
from penstock.serve.admission import Admission, Desk, Lane
from penstock.serve.metrics import Metrics
from penstock.serve.protocol import ApiError
from penstock.stream.pushed import PushedStream
from penstock.zoo.data.image_set import decode, size_of
from penstock.zoo.data.preprocess import check_resized
from penstock.zoo.models.models import ZooModel
from penstock.zoo.optional import optional_import

_SMALL_PIXELS = 2**22  # several images up to this size are decoded at a time


class ClassService:
    """Decodes images and classifies them through a pushed stream.

    Example:
        service = ClassService(stream, zoo, Admission(slots=8, most_waiting=64), Metrics(), deadline_s=60.0)
        image = await service.read(data, "image/png", "10.0.0.7")
        await service.classify(image, 5, "10.0.0.7")

    Raises `ApiError`.
    """

    def __init__(
        self, stream: PushedStream, zoo: ZooModel, admission: Admission, metrics: Metrics, *, deadline_s: float
    ) -> None:
        self.stream, self.admission, self.metrics = stream, admission, metrics
        self._zoo, self._deadline_s, self._names = zoo, deadline_s, zoo.class_names or ()
        self._transform, self._length = zoo.pictures(), max(zoo.picture_shape)
        self.desk = Desk(admission.most_waiting)

    async def read(self, data: bytes, content_type: str, client: str) -> Tensor:
        """Decode and preprocess an image: the body itself, or the first file of a multipart form."""
        self.admission.check_room(1, retry_s=self.metrics.typical_s)
        if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
            data = _first_file(data, content_type)
        if not data:
            raise ApiError("image: the body is empty; send the image's bytes, or a form with a file", param="image")
        try:
            size = await self.desk.run(client, "small", size_of, data)
            num_pixels = max(prod(size), check_resized(size, self._length))
            lane: Lane = "large" if num_pixels > _SMALL_PIXELS else "small"
            return await self.desk.run(client, lane, lambda: self._transform(decode(data, "that was sent")))
        except DataError as error:
            raise ApiError(str(error), param="image") from None

    async def classify(self, image: Tensor, top: int, client: str) -> dict[str, Any]:
        """Return the `top` likeliest classes and their scores."""
        (ticket,) = self.admission.enter(client, 1, retry_s=self.metrics.typical_s)
        asked_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._deadline_s), ticket:
                output = await asyncio.wrap_future(self.stream.push(as_input(self._zoo, [image])))
        except TimeoutError:
            self.metrics.ended("deadline", asked_s)
            raise ApiError(
                f"no result within {self._deadline_s:g} s, including the wait in the queue; try again later",
                code="deadline",
                status=504,
            ) from None
        except RunError:
            self.metrics.ended("error", asked_s)
            raise
        finally:
            ticket.leave()
        self.metrics.ended("stop", asked_s)
        scores = confidences(self._zoo, class_scores(output))[0]
        return {"object": "classes", "classes": best_classes(scores, self._names, top)}


def _first_file(data: bytes, content_type: str) -> bytes:
    """Return the first non-empty file of a multipart form, or its first non-empty part if no part has a file name."""
    library = optional_import("python_multipart.multipart", "serve")
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise ApiError("the Content-Type of a form must have a boundary", param="Content-Type")
    parts: list[bytearray] = []
    headers: list[bytearray] = []  # the headers of each part, without line breaks

    def begin() -> None:
        parts.append(bytearray())
        headers.append(bytearray())

    callbacks = {
        "on_part_begin": begin,
        "on_header_value": lambda part, begin, end: headers[-1].extend(part[begin:end]),
        "on_part_data": lambda part, begin, end: parts[-1].extend(part[begin:end]),
    }
    try:
        parser = library.MultipartParser(boundary.encode(), callbacks)
        parser.write(data)
        parser.finalize()
    except (library.MultipartParseError, ValueError) as problem:
        raise ApiError(f"the form cannot be read ({problem})", param="image") from None
    given = [
        (part, b"filename=" in header or b"filename*=" in header)
        for part, header in zip(parts, headers, strict=True)
        if part
    ]
    return bytes(max(given, key=lambda each: each[1], default=(b"", False))[0])
