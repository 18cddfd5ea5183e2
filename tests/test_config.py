"""Configuration: precedence, ranges, and messages that name option, value and what is allowed."""

from pathlib import Path

import pytest

from foxray.errors import UserError
from foxray.training.config import TrainConfig, default_batch_size, load_config

BASE = {"parquet_file": "bars.parquet"}


def test_flags_win_over_the_file_over_the_preset_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("learning-rate: 0.01\nbatch_size: 48\nmin-batch-size: 3\n")
    config = load_config(BASE | {"batch_size": 24}, file=file, preset="aggressive")
    assert config.batch_size == 24
    assert config.min_batch_size == 3
    assert config.learning_rate == 0.01
    assert load_config(BASE, preset="aggressive").min_batch_size == 4
    assert load_config(BASE).min_batch_size == 2


@pytest.mark.parametrize(
    ("preset", "batch_size", "minimum"),
    [("conservative", 32, 2), ("aggressive", 64, 4), ("low-vram", 128, 1), ("manual", 8, 8)],
)
def test_presets_are_the_four_quick_references(preset: str, batch_size: int, minimum: int) -> None:
    config = load_config(BASE, preset=preset)
    assert (config.batch_size, config.min_batch_size) == (batch_size, minimum)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 0}, ["--batch-size", "0", "greater than or equal to 1"]),
        ({"batch_size": -4}, ["--batch-size", "-4"]),
        ({"max_oom_retries": 11}, ["--max-oom-retries", "11", "10"]),
        ({"min_batch_size": 65}, ["--min-batch-size", "65", "64"]),
        ({"min_batch_size": 0}, ["--min-batch-size", "0"]),
        ({"precision": "fp8"}, ["--precision", "fp8", "bf16"]),
        ({"on_exhausted": "swap"}, ["--on-exhausted", "gradient-checkpointing"]),
        ({"hidden_dim": 10, "num_heads": 4}, ["hidden_dim 10", "num_heads 4"]),
        ({"epoch": 3}, ["epoch", "unknown option", "epochs"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(BASE | values)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_parquet_file_option_is_said() -> None:
    with pytest.raises(UserError, match="--parquet-file is required"):
        load_config({})


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\xff\xfe"])
def test_a_broken_config_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"train\.yaml"):
        load_config(BASE, file=file)


def test_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(UserError, match="conservative, aggressive, low-vram, manual"):
        load_config(BASE, preset="fast")


def test_rungs_come_as_a_list_of_words() -> None:
    assert load_config(BASE | {"on_exhausted": "raise"}).on_exhausted == ()
    config = load_config(BASE | {"on_exhausted": "gradient-checkpointing, cpu"})
    assert config.oom_policy.on_exhausted == ("gradient-checkpointing", "cpu")


def test_default_batch_size_is_smaller_for_long_data() -> None:
    assert default_batch_size(180.0) == 32
    assert default_batch_size(180.1) == 16


def test_plain_form_gives_the_same_configuration_again() -> None:
    config = load_config(BASE | {"on_exhausted": "cpu", "batch_size": 7})
    assert TrainConfig(**config.to_plain()) == config


def test_calibration_settings_without_use_qat_are_refused() -> None:
    with pytest.raises(
        UserError, match="--qat-min-batch-size 4: there is no calibration phase without --use-qat"
    ):
        load_config({"parquet_file": "bars.parquet", "qat_min_batch_size": 4})
    assert load_config({"parquet_file": "bars.parquet", "use_qat": True}).phases[0] == "calibration"


@pytest.mark.parametrize("batches", [9, 501])
def test_calibration_batches_are_10_to_500(batches: int) -> None:
    with pytest.raises(UserError, match=f"--qat-calibration-batches {batches}: input should be"):
        load_config({"parquet_file": "b", "use_qat": True, "qat_calibration_batches": batches})
