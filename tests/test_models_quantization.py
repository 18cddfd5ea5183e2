"""Quantization attached to the real TFT: what it leaves alone, what it rounds, and what it remembers."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from foxray.errors import UserError
from foxray.models.quantization import Quantization, channel_scales
from foxray.models.tft import TemporalFusionTransformer, TftConfig
from foxray.models.variable_selection import FeatureLinear

FEATURES, POSITIONS = 19, 6


def tft(**changes: object) -> TemporalFusionTransformer:
    torch.manual_seed(0)
    settings = {
        "num_features": FEATURES,
        "seq_len": POSITIONS,
        "hidden_dim": 8,
        "num_heads": 2,
        "dropout": 0.0,
    }
    model = TemporalFusionTransformer(TftConfig(**(settings | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def windows(batch: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(batch, POSITIONS, FEATURES, generator=torch.Generator().manual_seed(seed))


def calibrate(quantization: Quantization, model: nn.Module, batches: list[Tensor], pieces: int = 1) -> None:
    quantization.mode = "observe"
    with torch.no_grad():
        for batch in batches:
            for piece in batch.chunk(pieces):
                quantization.begin_piece()
                model(piece)
                quantization.commit_piece()
            quantization.commit_batch()


def calibrated(mode: str = "fake_quantize", **changes: object) -> tuple[nn.Module, Quantization]:
    model = tft(**changes)
    quantization = Quantization(model)
    calibrate(quantization, model, [windows(seed=s) for s in range(3)])
    quantization.mode = mode  # type: ignore[assignment]
    return model, quantization


class Single(nn.Module):
    """One linear map without offset."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(1, 1, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.only(x_BI)


def gradients(model: nn.Module, x_BTF: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x_BTF).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_linear_map_and_lstm_weight_is_covered() -> None:
    model = tft()
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.LSTM | FeatureLinear)}
    matrices = {n for n, p in model.named_parameters() if "weight" in n.rpartition(".")[2] and p.dim() > 1}
    quantization = Quantization(model)
    assert set(quantization.points) == layers
    rounded = {n.replace("parametrizations.", "").removesuffix(".original") for n in model.state_dict()
               if n.endswith(".original")}  # fmt: skip
    assert rounded == matrices
    assert len(rounded) == len(layers) + 1  # an LSTM has two


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_off_and_observe_change_no_bit_of_output_and_gradients(mode: str) -> None:
    plain = tft()
    model = copy.deepcopy(plain)
    Quantization(model).mode = mode  # type: ignore[assignment]
    assert torch.equal(plain(windows()), model(windows()))
    expected = gradients(plain, windows())
    for name, gradient in gradients(model, windows()).items():
        plain_name = name.replace("parametrizations.", "").removesuffix(".original")
        assert torch.equal(gradient, expected[plain_name]), name


def test_fake_quantized_output_is_near_and_not_equal_and_every_parameter_has_a_gradient() -> None:
    plain = tft()
    model, _ = calibrated()
    difference = (model(windows()) - plain(windows())).square().mean().sqrt()
    assert 0 < difference < 0.1 * plain(windows()).std()
    found = gradients(model, windows())
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for name, gradient in found.items() if "selection.embed" not in name)


def test_a_weight_is_rounded_to_its_channels_grid() -> None:
    model, _ = calibrated()
    for layer, name in ((model.lstm, "weight_hh_l0"), (model.selection.residuals.gate, "weight")):
        original = layer.parametrizations[name].original
        scale_C1 = channel_scales(original).unsqueeze(1)
        steps = getattr(layer, name).flatten(0, -2) / scale_C1
        torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
        assert ((getattr(layer, name) - original).flatten(0, -2).abs() <= 0.5001 * scale_C1).all()
        assert torch.equal(steps.abs().amax(1).round(), torch.full((len(steps),), 127.0))


def test_frozen_keeps_the_grid_that_fake_quantize_moves() -> None:
    for mode, kept in (("fake_quantize", False), ("frozen", True)):
        model, _ = calibrated(mode)
        before = model.head.weight.detach().clone()
        with torch.no_grad():
            model.head.parametrizations["weight"].original[0, 0] += 10.0
        assert torch.equal(model.head.weight[0, 1:], before[0, 1:]) is kept, mode


@pytest.mark.parametrize("pieces", [2, 4])
def test_ranges_do_not_depend_on_the_split(pieces: int) -> None:
    batches = [windows(seed=s) for s in range(5)]
    found = []
    for count in (1, pieces):
        model = tft()
        quantization = Quantization(model)
        calibrate(quantization, model, batches, count)
        found.append(quantization.activation_ranges())
    for name, (low, high) in found[0].items():
        assert found[1][name] == pytest.approx((low, high), abs=1e-6), name
        assert low < high


def test_the_average_moves_once_a_batch_by_its_minimum_and_maximum() -> None:
    layer = Single()
    quantization = Quantization(layer)
    calibrate(quantization, layer, [torch.tensor([[-1.0], [3.0]]), torch.tensor([[-2.0], [1.0]])], pieces=2)
    assert quantization.activation_ranges() == {"only": pytest.approx((-1.01, 2.98))}


def test_a_piece_that_was_not_committed_leaves_no_trace() -> None:
    found = []
    for interrupted in (False, True):
        model = tft()
        quantization = Quantization(model)
        quantization.mode = "observe"
        if interrupted:
            quantization.begin_piece()
            model(1e6 * windows())
        calibrate(quantization, model, [windows()], pieces=2)
        found.append(quantization.activation_ranges())
    assert found[0] == found[1]


def test_ranks_merge_by_the_smaller_of_their_batch_ranges() -> None:
    whole, halves = tft(), [tft(), tft()]
    expected = Quantization(whole)
    calibrate(expected, whole, [windows()])
    ranks = [Quantization(model) for model in halves]
    for rank, model, share in zip(ranks, halves, windows().chunk(2), strict=True):
        rank.mode = "observe"
        rank.begin_piece()
        model(share)
        rank.commit_piece()
    merged = torch.minimum(ranks[0].batch_range, ranks[1].batch_range)
    for rank in ranks:
        rank.batch_range.copy_(merged)
        rank.commit_batch()
        for name, limits in rank.activation_ranges().items():
            assert limits == pytest.approx(expected.activation_ranges()[name], abs=1e-6), name


def test_ranges_travel_with_the_state_dict() -> None:
    model, quantization = calibrated()
    restored = tft()
    again = Quantization(restored)
    restored.load_state_dict(model.state_dict())
    again.mode = "fake_quantize"
    assert again.activation_ranges() == quantization.activation_ranges()
    assert torch.equal(restored(windows()), model(windows()))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, _ = calibrated()
    expected = gradients(model, windows())
    model.gradient_checkpointing = True
    for name, gradient in gradients(model, windows()).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_no_graph_stays_behind_in_the_lstm() -> None:
    model, _ = calibrated()
    model(windows())
    assert model.lstm._flat_weights == []


def test_zero_is_on_the_grid_of_every_input() -> None:
    layer = Single()
    quantization = Quantization(layer)
    calibrate(quantization, layer, [torch.tensor([[0.5], [2.0]])])
    quantization.mode = "fake_quantize"
    assert layer(torch.zeros(1, 1)).item() == 0.0


def test_rounding_without_calibration_is_refused_and_names_the_layer() -> None:
    quantization = Quantization(tft())
    with pytest.raises(
        UserError, match=r"have no range of their inputs, the first is selection.*calibration"
    ):
        quantization.mode = "fake_quantize"
    assert quantization.mode == "off"
    with pytest.raises(ValueError, match="allowed: off, observe, fake_quantize, frozen"):
        quantization.mode = "int4"  # type: ignore[assignment]


def test_bfloat16_autocast_works() -> None:
    model, _ = calibrated()
    expected = model(windows())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(windows())
    assert (output.float() - expected).abs().max() < 0.1 * expected.std()
    assert math.isfinite(output.float().sum().item())
