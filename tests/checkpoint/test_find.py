"""Which .gguf files a path means, and the parts of a split model."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.checkpoint.find import find_gguf, read_first_header, read_headers
from serve.errors import ConfigError
from tests.checkpoint.gguf_bytes import write, write_part


def test_a_folder_that_holds_one_gguf_file_and_no_config_means_that_file(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    assert find_gguf(file) == find_gguf(tmp_path) == file
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path, "gguf") == file
    assert find_gguf(tmp_path, "safetensors") is None
    with pytest.raises(ConfigError, match="asks for safetensors"):
        find_gguf(file, "safetensors")


def test_ops_13_a_folder_without_a_model_or_with_several_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config\.json nor a \.gguf file"):
        find_gguf(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        write(tmp_path / name)
    with pytest.raises(ConfigError, match=r"several \.gguf files \(a\.gguf, b\.gguf\); name the"):
        find_gguf(tmp_path)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """x-00001-of-00003.gguf and so on."""
    names = (["a", "b"], [], ["c"])
    return [
        write_part(tmp_path / f"x-{i + 1:05d}-of-00003.gguf", i, 3, *names[i], total=3)
        for i in range(3)
    ]


def test_mdl_42_a_split_model_is_named_by_its_first_part_or_its_folder(parts: list[Path]) -> None:
    assert find_gguf(parts[0].parent) == parts[0]
    assert [header.path for header in read_headers(parts[0])] == parts
    assert [e.name for header in read_headers(parts[0]) for e in header.entries] == ["a", "b", "c"]
    assert read_first_header(parts[0]).path == parts[0]


def complaint(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_headers(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mdl_42_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    assert complaint(parts[0]).startswith(f"{parts[1]}: this part is missing beside")
    parts[2].unlink()
    assert f"{parts[1]}: this part and 1 more parts are missing" in complaint(parts[0])
    write(parts[1])
    parts[1].write_bytes(b"")
    (parts[2]).write_bytes(b"GGUF")
    assert str(parts[1]) in complaint(parts[0])


def test_mdl_42_without_the_first_part_it_is_named(parts: list[Path]) -> None:
    parts[0].unlink()
    with pytest.raises(ConfigError, match=f"{parts[0].name}: the first part"):
        find_gguf(parts[0].parent)


@pytest.mark.parametrize("read", [read_headers, read_first_header])
def test_mdl_42_a_later_part_says_which_file_to_name(parts: list[Path], read: object) -> None:
    assert callable(read)
    with pytest.raises(ConfigError, match=r"part 2 of 3 .* first part, x-00001-of-00003\.gguf"):
        read(parts[1])
    other = parts[2].rename(parts[2].with_name("other.gguf"))
    with pytest.raises(ConfigError, match="part 3 of 3 of a model; name its first part"):
        read(other)


def test_mdl_42_parts_out_of_order_or_of_another_model_are_named(parts: list[Path]) -> None:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    assert f"{parts[1]}: by its header this is part 3 of 3" in complaint(parts[0])
    parts[1].write_bytes(second)
    write_part(parts[2], 2, 4, "c")
    assert f"{parts[2]}: by its header this is part 3 of 4" in complaint(parts[0])
    write(parts[2])
    assert f"{parts[2]}: by its header this is part 1 of 1" in complaint(parts[0])


def test_mdl_42_a_tensor_in_two_parts_and_one_in_none_are_named(parts: list[Path]) -> None:
    write_part(parts[2], 2, 3, "a")
    assert f"{parts[2]}: tensor 'a' is in {parts[0].name} too" in complaint(parts[0])
    write_part(parts[2], 2, 3)
    assert "the parts hold 2 tensors of 3" in complaint(parts[0])


def test_mdl_42_a_first_part_under_another_name_says_how_parts_are_found(
    parts: list[Path],
) -> None:
    renamed = parts[0].rename(parts[0].with_name("x.gguf"))
    assert "must end in -00001-of-00003.gguf" in complaint(renamed)
    assert "llama-gguf-split --merge" in complaint(renamed)
    with pytest.raises(ConfigError, match=r"several \.gguf files \(x-00001-of-00003\.gguf, x\.g"):
        find_gguf(parts[0].parent)


@pytest.mark.parametrize(("number", "count"), [(3, 3), (1, 1), (7, 0)])
def test_mdl_42_impossible_places_are_refused(tmp_path: Path, number: int, count: int) -> None:
    file = write_part(tmp_path / "x-00001-of-00003.gguf", number, count)
    assert f"its split.no is {number} and its split.count {count}" in complaint(file)


def test_mdl_42_a_whole_model_may_be_called_like_a_part(tmp_path: Path) -> None:
    file = write(tmp_path / "x-00001-of-00002.gguf")
    assert [header.path for header in read_headers(file)] == [file]
    assert len(read_headers(write_part(tmp_path / "one.gguf", 0, 1, "a", total=1))) == 1
