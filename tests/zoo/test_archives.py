"""Archives of images: zip, compressed tar files, and WebDataset's labels."""

import os
import pickle
import shutil
import stat
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.zoo.data.archives import open_archive
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import MAX_FILE_BYTES, ImageSet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for index in range(6):
        place = root / ("cats" if index % 2 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (40 * index, 0, 0)).save(place / f"{index}.png")
    (root / "empty").mkdir()
    (root / "notes.md").write_text("no image")
    return root


def zipped(folder: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    target = folder.with_suffix(".zip")
    with zipfile.ZipFile(target, "w", method) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent))
    return target


def same(found: ImageSet, expected: ImageSet) -> bool:
    pixels = [[images.read(row).tobytes() for row in range(len(images))] for images in (found, expected)]
    return (found.labels, found.classes, found.left_out) == (
        expected.labels,
        expected.classes,
        expected.left_out,
    ) and pixels[0] == pixels[1]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_zip_is_like_its_folder(folder: Path, method: int) -> None:
    assert same(open_images(zipped(folder, method)), open_images(folder))


@pytest.mark.parametrize("suffix", [".tar.xz", ".txz", ".tar.bz2", ".tar.gz", ".TGZ"])
def test_a_compressed_tar_is_like_its_folder(folder: Path, suffix: str) -> None:
    kind = {"x": "xz", "b": "bz2", "g": "gz"}[suffix.lower().removeprefix(".tar.").lstrip(".t")[0]]
    target = folder.with_name(f"photos{suffix}")
    with tarfile.open(target, f"w:{kind}") as archive:  # type: ignore[call-overload]
        archive.add(folder, "photos")
    assert same(open_images(target), open_images(folder))
    target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    with pytest.raises(DataError, match="not a whole tar file"):
        open_images(target)


def test_a_zip_is_read_from_threads_and_copies(folder: Path) -> None:
    images = open_images(zipped(folder))
    copied = pickle.loads(pickle.dumps(images))  # as a loading process gets it
    with ThreadPoolExecutor(4) as pool:
        for each in (images, copied):
            found = list(pool.map(lambda row, of=each: of.read(row % 6).getpixel((0, 0)), range(60)))
            assert found == found[:6] * 10


def test_damaged_zip_is_reported(folder: Path) -> None:
    path = zipped(folder, zipfile.ZIP_STORED)
    whole = path.read_bytes()
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("photos/cats/link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "../dogs/0.png")
    assert "1 links" in open_images(path).left_out
    place = whole.index(b"IDAT")
    path.write_bytes(whole[:place] + b"XXXX" + whole[place + 4 :])
    images = open_images(path)
    broken = [row for row in range(6) if _fails(images, row)]
    assert len(broken) == 1
    path.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="not a whole zip file"):
        open_images(path)


def test_archive_has_limits(folder: Path) -> None:
    path = zipped(folder)
    with pytest.raises(DataError, match="more than 2 files"):
        open_archive(path, most=2)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("huge.png", bytes(MAX_FILE_BYTES + 1))
    with pytest.raises(DataError, match=f"more than the {MAX_FILE_BYTES} bytes"):
        open_images(path).read(0)


def _fails(images: ImageSet, row: int) -> bool:
    try:
        images.read(row)
    except DataError:
        return True
    return False


def web(path: Path, labels: dict[str, bytes], *, compressed: bool = False) -> Path:
    """Write a shard of WebDataset: files of a sample one after the other."""
    data = BytesIO()
    Image.new("RGB", (8, 8)).save(data, "JPEG")
    with tarfile.open(path, "w:gz" if compressed else "w") as archive:
        for key, label in labels.items():
            for suffix, content in ((".cls", label), (".jpg", data.getvalue()), (".json", b"{}")):
                if content:
                    member = tarfile.TarInfo(f"{key}{suffix}")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_labels_of_webdataset(tmp_path: Path, compressed: bool) -> None:
    name = "a.tar.gz" if compressed else "a.tar"
    images = open_images(
        web(tmp_path / name, {"x/0001": b"7\n", "x/0002": b"12", "y/0003": b"", "y/0004": b"7"}, compressed=compressed)
    )
    assert images.names == ["x/0001.jpg", "x/0002.jpg", "y/0003.jpg", "y/0004.jpg"]
    assert [None if label is None else images.classes[label] for label in images.labels] == ["7", "12", None, "7"]
    assert (images.by_folder, images.left_out) == (False, "4 .json files")
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    for path in (tmp_path / "unpacked").rglob("*.*"):
        os.utime(path)  # a zip begins in 1980
    shutil.make_archive(str(tmp_path / "b"), "zip", tmp_path / "unpacked")
    assert open_images(tmp_path / "b.zip").labels == images.labels


@pytest.mark.parametrize("label", [b" ", b"\xff\xfe", b"1" * 5000])
def test_files_without_labels_are_refused(tmp_path: Path, label: bytes) -> None:
    with pytest.raises(DataError, match=r"1\.cls in .*a\.tar must hold"):
        open_images(web(tmp_path / "a.tar", {"1": label}))


def test_several_shards_are_one_set(tmp_path: Path) -> None:
    shards = [str(web(tmp_path / f"{n}.tar", {f"{n}{i}": str(i + n).encode() for i in range(3)})) for n in range(2)]
    images = open_images(shards)
    assert [images.classes[label] for label in images.labels if label is not None] == ["0", "1", "2", "1", "2", "3"]
    assert images.names[0] == f"{shards[0]}/00.jpg"
    (tmp_path / "list.txt").write_text("0.tar\n1.tar\n")
    assert open_images(tmp_path / "list.txt").labels == images.labels
