"""Card names, sizes as text, and what of a card can be used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foxray.errors import UserError
from foxray.memory.catalogue import (
    GIB,
    GPUS,
    MIB,
    Gpu,
    find_gpu,
    format_bytes,
    parse_bytes,
    parse_gpu_or_bytes,
)

WANTED = (
    "RTX 3050 Ti, RTX 3060 8GB, RTX 3060 12GB, RTX 2060, RTX 2080 Ti, RTX 3070, RTX 3080, RTX 3090, "
    "RTX 4060, RTX 4070, RTX 4080, RTX 4090, RTX 5090, T4, V100 16GB, V100 32GB, A10, A10G, L4, L40S, A40, "
    "A4000, A5000, A6000, RTX 6000 Ada, A100 40GB, A100 80GB, H100, H200, B200"
)


@pytest.mark.parametrize("name", WANTED.split(", "))
def test_the_cards_people_train_on_are_known(name: str) -> None:
    assert find_gpu(name) in GPUS


def test_a_4gb_card_holds_about_3250_mib_of_tensors() -> None:
    assert 3240 * MIB < find_gpu("RTX 3050 Ti").usable_bytes < 3260 * MIB


def test_hopper_gives_cublas_a_larger_workspace() -> None:
    assert find_gpu("H100").workspace_bytes == 32 * MIB
    assert find_gpu("B200").workspace_bytes == 32 * MIB
    assert find_gpu("RTX 4090").workspace_bytes == 8.125 * MIB


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx3050ti", "RTX 3050 Ti"),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", "RTX 3050 Ti"),
        ("nvidia-geforce-rtx-3050-ti", "RTX 3050 Ti"),
        ("3050 Ti", "RTX 3050 Ti"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("a100 80 gb", "A100 80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("A10 24GB", "A10"),
        ("RTX 4090 Laptop", "RTX 4090 Laptop"),
    ],
)
def test_a_name_is_found_however_it_is_written(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize(("name", "smallest"), [("A100", "40GB"), ("RTX 3060", "8GB"), ("V100", "16GB")])
def test_a_bare_name_with_several_sizes_means_the_smallest(name: str, smallest: str) -> None:
    assert find_gpu(name).name == f"{name} {smallest}"


@given(st.sampled_from(GPUS), st.sampled_from([str.upper, str.lower, lambda name: name.replace(" ", "  ")]))
def test_every_card_is_found_by_its_own_name(gpu: Gpu, rewrite: object) -> None:
    assert find_gpu(rewrite(gpu.name)) is gpu  # type: ignore[operator]


def test_an_unknown_card_is_answered_with_close_names_and_the_list() -> None:
    with pytest.raises(UserError, match=r"unknown GPU 'RTX 3055 Ti'\. Did you mean: .*RTX 3050 Ti") as error:
        find_gpu("RTX 3055 Ti")
    assert "H200" in str(error.value)


def test_a_known_card_with_a_wrong_size_lists_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"A100 40GB \(40\.00 GiB\), A100 80GB"):
        find_gpu("A100 60GB")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("400MiB", 400 * MIB),
        ("3.5GB", 3_500_000_000),
        ("1GiB", GIB),
        ("1 gib", GIB),
        ("419430400", 419430400),
        ("0.5 KiB", 512),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_means_exactly_that_many_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "4 XB", "1e9", "nan", "400M", "0", "0.1 bytes", "1.2.3MB"]
)
def test_a_bad_size_is_answered_with_examples(text: str) -> None:
    with pytest.raises(UserError, match="400MiB"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=2**60))
def test_a_formatted_size_reads_back_within_its_two_decimals(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(1, size * 0.0051)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (1342177280, "1.25 GiB"),
        (GIB - 1, "1.00 GiB"),
    ],
)
def test_sizes_are_written_as_cuda_writes_them(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_card_means_its_usable_bytes_and_a_size_exactly_that_many() -> None:
    assert parse_gpu_or_bytes("rtx 3050 ti") == ("RTX 3050 Ti", find_gpu("RTX 3050 Ti").usable_bytes)
    assert parse_gpu_or_bytes("3050 Ti")[0] == "RTX 3050 Ti"
    assert parse_gpu_or_bytes("400MiB") == ("400.00 MiB", 400 * MIB)
    assert parse_gpu_or_bytes("419430400") == ("400.00 MiB", 419430400)


@pytest.mark.parametrize(
    ("text", "message"),
    [("4090", "RTX 4090"), ("", "RTX 3050 Ti"), ("400M", "400MiB"), ("Voodoo 2", "3.5GB"), ("0", "above 0")],
)
def test_what_cannot_be_emulated_is_refused_with_the_next_step(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_gpu_or_bytes(text)


def test_a_card_too_small_for_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context"):
        Gpu(name="tiny", vram_bytes=256 * MIB)


def test_the_catalogue_does_not_import_torch() -> None:
    code = "import sys, foxray.memory.catalogue; assert not {'torch', 'ray', 'pynvml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
