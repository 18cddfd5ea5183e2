"""Checkpoints: whole or not there."""

from pathlib import Path

import pytest
import torch

from foxray.training.checkpoint import Checkpoints, CommittedState


def save(checkpoints: Checkpoints, step: int) -> Path:
    model = {"w": torch.full((3,), float(step))}
    return Path(checkpoints.save(CommittedState(step=step, effective_batch=8), model, {"state": {}}))


def test_the_newest_is_restored_and_only_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), spec={"model": "tft"})
    assert checkpoints.load_latest() is None
    for step in (1, 2, 3):
        save(checkpoints, step)
    restored = checkpoints.load_latest()
    assert restored is not None
    assert restored.state.step == 3 and restored.spec == {"model": "tft"}
    assert torch.equal(restored.model["w"], torch.full((3,), 3.0))
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip", "manifest"])
def test_a_torn_checkpoint_leaves_the_one_before_in_force(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    save(checkpoints, 1)
    path = save(checkpoints, 2)
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-10])
    elif damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(content[:-10] + bytes(10))
    else:
        path.with_suffix(".json").write_text('{"file": ')
    restored = checkpoints.load_latest()
    assert restored is not None and restored.state.step == 1
    (skipped,) = checkpoints.skipped
    assert path.stem in skipped


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(CommittedState(step=1), {"w": Evil()}, {})  # type: ignore[dict-item]
    with pytest.raises(Exception, match=r"[Ww]eights"):
        checkpoints.load_latest()
    assert not (tmp_path / "ran").exists()


def test_an_object_store_uri_works(tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/deep/er")
    save(checkpoints, 5)
    restored = Checkpoints(f"file://{tmp_path}/deep/er").load_latest()
    assert restored is not None and restored.state.step == 5
