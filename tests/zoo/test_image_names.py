"""Sets of images from every source, good and bad."""

import errno
import gzip
import os
import pickle
import tarfile
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.errors import DataError
from penstock.resources import peak_bytes
from penstock.zoo.data import image_set
from penstock.zoo.data.folders import natural_key
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.image_set import ImageSet
from tests.disks import Disk

SHARED = Path(__file__).parents[3] / "shared" / "data"
COLORS = {
    "cats/1.png": "red", "cats/10.png": "lime", "cats/9.jpg": "blue", "dogs/a.webp": "white", "dogs/b.bmp": "black",
}  # fmt: skip
NAMES = ["cats/1.png", "cats/9.jpg", "cats/10.png", "dogs/a.webp", "dogs/b.bmp"]


def write(path: Path, color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), color).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for name, color in COLORS.items():
        write(root / name, color)
    (root / "notes.txt").write_text("no image")
    (root / "cats" / "._1.png").write_text("left by another system")
    return root


def pack(root: Path, target: Path, mode: str) -> Path:
    with tarfile.open(target, mode) as archive:  # type: ignore[call-overload]
        archive.add(root, root.name)
    return target


def corners(images: ImageSet) -> list[tuple[int, ...]]:
    return [images.read(index).getpixel((0, 0)) for index in range(len(images))]  # type: ignore[misc]


def test_a_folder_is_labelled_by_sub_folder_in_natural_order(folder: Path) -> None:
    images = open_images(folder)
    assert [images.name(index) for index in range(len(images))] == NAMES
    assert [images.label(index) for index in range(5)] == [0, 0, 0, 1, 1]
    assert images.classes == ("cats", "dogs")
    assert images.read(0).mode == "RGB"
    assert images.read(0).size == (8, 6)
    assert [corners(images)[index] for index in (0, 2, 3, 4)] == [(255, 0, 0), (0, 255, 0), (255, 255, 255), (0, 0, 0)]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("img10.png", "img9.png"):
        write(tmp_path / name)
    images = open_images(str(tmp_path))
    assert [images.name(0), images.name(1)] == ["img9.png", "img10.png"]
    assert (images.label(0), images.classes) == (None, ())
    assert open_images(pack(tmp_path, tmp_path.with_suffix(".tar"), "w")).classes == ()


def test_one_sub_folder_is_one_class_and_outer_folders_are_passed_through(tmp_path: Path) -> None:
    write(tmp_path / "one" / "cats" / "1.png")
    assert open_images(tmp_path / "one").classes == ("cats",)
    write(tmp_path / "two" / "set" / "test" / "cats" / "1.png")
    write(tmp_path / "two" / "set" / "test" / "dogs" / "1.png")
    assert open_images(tmp_path / "two").classes == ("cats", "dogs")


def test_a_folder_of_links_is_followed_and_does_not_end_in_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cats").symlink_to(folder / "cats")
    (tmp_path / "links" / "self").symlink_to(tmp_path / "links")
    assert len(open_images(tmp_path / "links")) == 3
    (tmp_path / "links" / "also").symlink_to(folder / "cats")  # had been left out, without a word
    assert open_images(tmp_path / "links").classes == ("also", "cats")
    assert len(open_images(tmp_path / "links")) == 6


def test_ignored_files_are_counted(folder: Path, tmp_path: Path) -> None:
    for name in ("cats/a.heic", "cats/b.HEIC", "dogs/c.mp4", "Makefile", ".hidden"):
        (folder / name).write_text("")
    expected = {"2 .heic files", "1 .mp4 files", "1 .txt files", "1 Makefile files"}
    for images in (open_images(folder), open_images(pack(folder, tmp_path / "a.tar", "w"))):
        assert set(images.left_out.split(", ")) == expected


@pytest.mark.parametrize("suffix", [".tif", ".tiff", ".ppm", ".pgm", ".gif", ".jfif", ".JPE", ".avif", ".jp2", ".tga"])
def test_formats_that_pillow_decodes(tmp_path: Path, suffix: str) -> None:
    image = Image.new("L" if suffix == ".pgm" else "RGB", (16, 16), 200 if suffix == ".pgm" else (200, 200, 200))
    image.save(tmp_path / f"a{suffix}", Image.registered_extensions()[suffix.lower()])
    found = open_images(tmp_path).read(0).getpixel((3, 3))
    assert all(abs(value - 200) < 4 for value in found)  # type: ignore[union-attr]
    assert open_images(tmp_path / f"a{suffix}").read(0).size == (16, 16)


def test_pixels_that_are_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    Image.new("F", (4, 4), 0.5).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif .* floating-point"):
        open_images(tmp_path).read(0)


def test_a_folder_without_images_keeps_its_number(folder: Path, tmp_path: Path) -> None:
    (folder / "a bird").mkdir()
    (folder / "cow").mkdir()
    (folder / "cow" / "1.heic").write_text("")
    (folder / ".cache").mkdir()
    for images in (open_images(folder), open_images(pack(folder, tmp_path / "a.tar", "w"))):
        assert images.classes == ("a bird", "cats", "cow", "dogs")
        assert [images.label(index) for index in range(5)] == [1, 1, 1, 3, 3]
    write(tmp_path / "flat" / "1.png")
    (tmp_path / "flat" / "empty").mkdir()
    assert open_images(tmp_path / "flat").classes == ()


def test_a_folder_that_cannot_be_entered_is_refused(folder: Path, disk: Disk) -> None:
    disk.fail("scandir", errno.EACCES, only="/dogs")
    with pytest.raises(DataError, match=r"dogs cannot be read .*Permission denied"):
        open_images(folder)


def test_links_in_archives_are_files(folder: Path, tmp_path: Path) -> None:
    os.link(folder / "cats" / "1.png", folder / "dogs" / "hard.png")
    (folder / "dogs" / "soft.png").symlink_to("../cats/1.png")
    (folder / "dogs" / "again.png").symlink_to("soft.png")
    (folder / "dogs" / "none.png").symlink_to("nowhere.png")
    images = open_images(pack(folder, tmp_path / "a.tar", "w"))
    found = {name.rpartition("/")[2]: images.read(row).getpixel((0, 0)) for row, name in enumerate(images.names)}
    assert found["hard.png"] == found["soft.png"] == found["again.png"] == (255, 0, 0)
    assert "none.png" not in found
    assert "1 links without a file" in images.left_out


def test_folder_with_images_ignores_cifar_names(folder: Path, tmp_path: Path) -> None:
    (folder / "train.bin").write_bytes(b"weights")
    assert open_images(folder).classes == ("cats", "dogs")
    assert ".bin" in open_images(pack(folder, tmp_path / "a.tar", "w")).left_out


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
def test_an_image_is_turned_as_pillow_turns_it(tmp_path: Path, orientation: int, suffix: str) -> None:
    image = Image.effect_noise((12, 8), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a{suffix}", exif=exif)
    with Image.open(tmp_path / f"a{suffix}") as kept:
        expected = ImageOps.exif_transpose(kept).convert("RGB")
    assert open_images(tmp_path).read(0).tobytes() == expected.tobytes()


def test_exif_that_pillow_cannot_write_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=exif)
    monkeypatch.setattr(Image.Exif, "tobytes", lambda *_: 1 / 0)
    assert open_images(tmp_path).read(0).size == (6, 8)


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz")])
def test_an_archive_is_like_its_folder(folder: Path, tmp_path: Path, suffix: str, mode: str) -> None:
    images = open_images(pack(folder, tmp_path / f"photos{suffix}", mode))
    assert [image.rpartition("photos/")[2] for image in images.names] == NAMES
    assert images.classes == ("cats", "dogs")
    assert corners(images) == corners(open_images(folder))
    assert images.read(0).tobytes() == open_images(folder).read(0).tobytes()  # back to the beginning
    assert corners(pickle.loads(pickle.dumps(images))) == corners(images)


def test_one_image_is_a_set(folder: Path) -> None:
    images = open_images(folder / "cats" / "1.png")
    assert (len(images), images.name(0), images.label(0)) == (1, "1.png", None)
    assert corners(images) == [(255, 0, 0)]


def test_take_gives_the_first(folder: Path) -> None:
    images = open_images(folder).take(2)
    assert (len(images), images.name(1), images.label(1)) == (2, "cats/9.jpg", 0)
    assert images.read(0).size == (8, 6)
    for num_images in (0, -1, 3):
        with pytest.raises(DataError, match=f"2 images; got {num_images}; request 1 to 2"):
            images.take(num_images)
    with pytest.raises(DataError, match="must be 0 to 1; got 2"):
        images.read(2)


def test_sixteen_bit_grey_keeps_its_range(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 257 * 100], [65535, 0]], dtype=np.uint16)).save(tmp_path / "a.png")
    image = open_images(tmp_path).read(0)
    assert [image.getpixel(at) for at in ((0, 0), (1, 0), (0, 1))] == [(0,) * 3, (100,) * 3, (255,) * 3]


def test_a_damaged_image_is_named_and_the_others_stay(folder: Path) -> None:
    bad = folder / "cats" / "9.jpg"
    data = bad.read_bytes()
    for damaged in (data[:200], b"", b"hello", b"GIF89a" + bytes(20)):
        bad.write_bytes(damaged)
        images = open_images(folder)
        with pytest.raises(DataError, match=r"^the image cats/9\.jpg cannot be read \((?!'MPO').*\)$"):
            images.read(1)
        assert images.read(2).size == (8, 6)
    images = open_images(folder)
    bad.unlink()
    with pytest.raises(DataError, match=r"^the image cats/9\.jpg cannot be read"):
        images.read(1)


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match=r"^the image bomb\.png cannot be read"):
        open_images(tmp_path).read(0)
    Image.new("1", (2**13, 2**13 + 1)).save(tmp_path / "cats.png")
    with pytest.raises(DataError, match=rf"cats\.png .* {2**26 + 2**13} .* {2**26}"):
        open_images(tmp_path).read(1)


def test_a_cut_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    for suffix, mode in ((".tar", "w"), (".tar.gz", "w:gz")):
        whole = pack(folder, tmp_path / f"a{suffix}", mode)
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(whole.read_bytes()[:700])
        with pytest.raises(DataError, match="cut"):
            corners(open_images(cut))
    (tmp_path / "text.tar").write_text("hello")
    with pytest.raises(DataError, match=r"text\.tar is not a whole tar file"):
        open_images(tmp_path / "text.tar")


def test_paths_that_hold_no_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none not found; give a folder, an image"):
        open_images(tmp_path / "none")
    with pytest.raises(DataError, match=r"looked for \.jpg, .*\.bmp.* and CIFAR"):
        open_images(tmp_path)
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(DataError, match=r"a\.pdf is not a set of images"):
        open_images(tmp_path / "a.pdf")
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"a\.tar holds no images"):
        open_images(tmp_path / "a.tar")


def records(labels: list[list[int]], start: int = 0) -> bytes:
    return b"".join(
        bytes(label) + b"".join(bytes([start + index + plane]) * 1024 for plane in (0, 100, 200))
        for index, label in enumerate(labels)
    )


def cifar10(root: Path) -> Path:
    root.mkdir()
    (root / "data_batch_1.bin").write_bytes(records([[3], [0]]))
    (root / "data_batch_2.bin").write_bytes(records([[9]], 20))
    (root / "test_batch.bin").write_bytes(records([[1]], 30))
    (root / "batches.meta.txt").write_text("airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n")
    return root


def test_cifar_10_records(tmp_path: Path) -> None:
    root = cifar10(tmp_path / "cifar-10-batches-bin")
    archive = pack(root, tmp_path / "cifar-10-binary.tar.gz", "w:gz")
    for path in (root, archive):
        images = open_images(path)
        assert [images.label(index) for index in range(len(images))] == [3, 0, 9, 1]
        assert images.classes[3] == "cat"
        assert corners(images) == [(0, 100, 200), (1, 101, 201), (20, 120, 220), (30, 130, 230)]
        assert images.read(0).size == (32, 32)
    test = open_images(root / "test_batch.bin")
    assert (test.name(0), test.label(0), len(test)) == ("test_batch.bin#0", 1, 1)


def test_cifar_100_has_coarse_and_fine_labels(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(records([[4, 99], [0, 7]]))
    images = open_images(tmp_path)
    assert [images.label(0), images.label(1)] == [99, 7]
    assert images.classes[99] == "99"
    assert corners(images)[0] == (0, 100, 200)


def test_damaged_cifar_files(tmp_path: Path) -> None:
    file = tmp_path / "test_batch.bin"
    for data, message in ((b"", "3073 bytes; got 0;"), (bytes(3072), "3073 bytes; got 3072;")):
        file.write_bytes(data)
        with pytest.raises(DataError, match=message):
            open_images(tmp_path)
    file.write_bytes(records([[10]]))
    with pytest.raises(DataError, match="has the label 10 of 10 classes"):
        open_images(tmp_path)
    (tmp_path / "other.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is not named like CIFAR's files"):
        open_images(tmp_path / "other.bin")
    (tmp_path / "train.bin").write_bytes(records([[0, 0]]))
    with pytest.raises(DataError, match="mixes CIFAR-10 and CIFAR-100"):
        open_images(tmp_path)


def test_digits_need_no_download() -> None:
    images = open_images("digits")
    assert (len(images), images.name(7), images.label(7), len(images.classes)) == (1797, "digits/0007", 7, 10)
    assert images.read(0).size == (8, 8)
    assert images.read(0).mode == "RGB"
    assert int(np.asarray(images.read(0)).max()) in range(230, 256)


@pytest.mark.skipif(not (SHARED / "cifar10-test.tar").exists(), reason="shared/data/cifar10-test.tar is not here")
def test_the_real_cifar_archive() -> None:
    images = open_images(SHARED / "cifar10-test.tar")
    assert len(images) == 10_000
    assert images.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    assert (images.name(0), images.label(9_999)) == ("cifar10/test/airplane/0000.jpg", 9)
    assert images.read(5_000).size == (32, 32)


def test_decoding_keeps_warning_filters() -> None:
    buffer = BytesIO()
    Image.new("RGB", (3, 2), "blue").save(buffer, "PNG")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):  # any change of the filters shows it again
            image_set.decode(buffer.getvalue(), "x")
            warnings.warn("the transform is slow", UserWarning, stacklevel=1)
    assert len(shown) == 1


def test_a_name_of_more_digits_than_a_number_may_have() -> None:
    long = "9" * 5000
    names = [f"{long}1.png", f"{long}.png", "10.png", "9.png", "010.png", "a1.png"]
    assert sorted(names, key=natural_key) == ["9.png", "010.png", "10.png", f"{long}.png", f"{long}1.png", "a1.png"]


class Zeros(BytesIO):
    """As many zeros as are read."""

    def read(self, count: int | None = None) -> bytes:
        return bytes(count or 0)


def small_tar(path: Path, members: dict[str, tuple[bytes, int]]) -> Path:
    """A compressed archive whose members are zeros: what each is (a type of tarfile's), and how long."""
    with tarfile.open(path, "w:gz") as archive:
        for name, (kind, size) in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, size
            archive.addfile(member, Zeros())
    return path


def test_an_archive_does_not_fill_the_memory(tmp_path: Path) -> None:
    large = 80 * 2**20
    before = peak_bytes()
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
        with pytest.raises(DataError):
            open_images(small_tar(tmp_path / "header.tar.gz", {"x": (kind, large), "a/1.png": (tarfile.REGTYPE, 9)}))
    names = {"batches.meta.txt": (tarfile.REGTYPE, large), "data_batch_1.bin": (tarfile.REGTYPE, 3073)}
    assert len(open_images(small_tar(tmp_path / "names.tar.gz", names))) == 1
    images = open_images(small_tar(tmp_path / "image.tar.gz", {"a/1.png": (tarfile.REGTYPE, large)}))
    with pytest.raises(DataError):
        images.read(0)
    assert peak_bytes() - before < large / 2


def test_headers_are_not_kept(tmp_path: Path) -> None:
    """A million empty files are a few hundred kilobytes."""
    path = tmp_path / "many.tar.gz"
    header = tarfile.TarInfo("a/1.png")
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(20_000):
            header.name = f"a/{number}.png"
            file.write(header.tobuf())
        file.write(bytes(1024))
    assert len(open_images(path)) == 20_000


def test_a_list_of_paths_keeps_its_order(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["dogs/b.bmp", "cats/10.png", "cats/gone.png", "cats/9.jpg", "dogs/b.bmp"]
    for place, prefix in ((folder, ""), (tmp_path, "photos/"), (tmp_path, f"{folder}/")):
        monkeypatch.chdir(tmp_path)
        (place / "list.txt").write_text("\ufeff" + "\r\n".join(prefix + line for line in lines), encoding="utf-8")
        images = open_images(place / "list.txt")
        assert images.names == [prefix + line for line in lines]
        assert (images.classes, images.labels) == (("cats", "dogs"), [1, 0, 0, 0, 1])
        assert [images.read(row).getpixel((0, 0)) for row in (0, 1)] == [(0, 0, 0), (0, 255, 0)]
        with pytest.raises(DataError, match=r"gone\.png cannot be read"):
            images.read(2)
    (tmp_path / "a.txt").write_text("photos/cats\nphotos/dogs/a.webp")
    assert open_images(tmp_path / "a.txt").names[2:] == ["photos/cats/10.png", "photos/dogs/a.webp"]


@pytest.mark.parametrize("text", ["", "\n", "photos/cats/1.png 3\n", "nowhere.png", "\x00"])
def test_invalid_lists_of_paths_are_refused(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    Path("list.txt").write_text(text)
    with pytest.raises(DataError, match=r"list\.txt"):
        open_images("list.txt")


def test_several_paths_are_one_set(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "more" / "ants" / "1.png")
    write(tmp_path / "more" / "dogs" / "1.png")
    paths = [str(folder), str(tmp_path / "more"), str(folder / "cats" / "1.png"), "digits"]
    images = open_images(paths)
    assert images.classes[:3] == ("0", "1", "2")
    assert images.classes[-3:] == ("ants", "cats", "dogs")
    found = [images.name(row) for row in (0, 4, 5, 7)]
    assert found == [f"{folder}/cats/1.png", f"{folder}/dogs/b.bmp", f"{tmp_path}/more/ants/1.png", paths[2]]
    assert [images.classes[images.labels[row] or 0] for row in (0, 4, 5, 6)] == ["cats", "dogs", "ants", "dogs"]
    assert images.label(7) is None
    assert corners(images.take(6))[5] == (255, 0, 0)
    assert images.read(len(images) - 1).size == (8, 8)
    assert images.left_out == "1 .txt files"
    assert open_images([str(folder)]).names == NAMES


@pytest.mark.parametrize("mode", ["RGBA", "LA", "CMYK", "L", "1"])
def test_an_image_of_any_mode_has_the_pixels_of_pillows_conversion(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode) if mode != "CMYK" else Image.fromarray(pixels, "CMYK")
    buffer = BytesIO()
    image.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    expected = np.asarray(Image.open(BytesIO(buffer.getvalue())).convert("RGB"))
    assert np.array_equal(np.asarray(image_set.decode(buffer.getvalue(), "x")), expected)
