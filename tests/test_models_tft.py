"""The Temporal Fusion Transformer: its invariants, and its batched parts against loops written here.

Shapes: B batch, T positions, F features, H hidden, Q quantiles.
"""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foxray.errors import UserError
from foxray.memory.budget import memory_budget
from foxray.models.layers import GateAddNorm, InterpretableAttention
from foxray.models.quantile import initialise_quantile_head, quantile_loss
from foxray.models.tft import TemporalFusionTransformer, TftConfig
from foxray.models.variable_selection import FEATURES_PER_CHUNK, VariableSelection, _GateAddNormSum

NUM_FEATURES = 2 * FEATURES_PER_CHUNK + 3  # several chunks, the last one short


def tft(**changes: Any) -> TemporalFusionTransformer:
    """A small model in float64, with every parameter away from its initial zeros and ones."""
    torch.manual_seed(0)
    settings = {"num_features": NUM_FEATURES, "seq_len": 6, "hidden_dim": 8, "num_heads": 2, "dropout": 0.0}
    model = TemporalFusionTransformer(TftConfig(**(settings | changes))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def windows(batch: int = 4, num_features: int = NUM_FEATURES, positions: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, positions, num_features, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    collected = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        collected.append(parameter.grad)
        parameter.grad = None
    return collected


STATIC_BS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])


@pytest.mark.parametrize("static", [(), (3, 3)])
def test_last_position_of_forward_all_is_forward(static: tuple[int, ...]) -> None:
    model = tft(static_cardinalities=static)
    static_BS = STATIC_BS if static else None
    everything = model.forward_all(windows(), static_BS)
    assert everything.quantiles_BTQ.shape == (4, 6, 3)
    assert everything.attention_BATT.shape == (4, 2, 6, 6)
    torch.testing.assert_close(model(windows(), static_BS), everything.quantiles_BTQ[:, -1])


def test_selection_weights_are_a_distribution() -> None:
    selection_BTF = tft().forward_all(windows()).selection_BTF
    assert selection_BTF.shape == (4, 6, NUM_FEATURES)
    assert (selection_BTF >= 0).all()
    torch.testing.assert_close(selection_BTF.sum(-1), torch.ones(4, 6, dtype=torch.float64))


def test_attention_is_a_distribution_over_the_past() -> None:
    attention_BATT = tft().forward_all(windows()).attention_BATT
    assert (attention_BATT.triu(1) == 0).all()
    torch.testing.assert_close(attention_BATT.sum(-1), torch.ones(4, 2, 6, dtype=torch.float64))


@pytest.mark.parametrize("position", range(5))
def test_no_output_depends_on_the_future(position: int) -> None:
    model = tft()
    x_BTF = windows()
    changed_BTF = x_BTF.clone()
    changed_BTF[:, position + 1 :] += 10.0
    before, after = model.forward_all(x_BTF), model.forward_all(changed_BTF)
    upto = slice(0, position + 1)
    torch.testing.assert_close(before.quantiles_BTQ[:, upto], after.quantiles_BTQ[:, upto], rtol=0, atol=0)
    torch.testing.assert_close(before.selection_BTF[:, upto], after.selection_BTF[:, upto], rtol=0, atol=0)
    assert not torch.allclose(before.quantiles_BTQ[:, position + 1 :], after.quantiles_BTQ[:, position + 1 :])


def test_samples_do_not_mix_and_static_inputs_matter() -> None:
    model = tft(static_cardinalities=(3, 3))
    whole_BQ = model(windows(), STATIC_BS)
    torch.testing.assert_close(model(windows()[1:2], STATIC_BS[1:2]), whole_BQ[1:2])
    assert not torch.allclose(model(windows(), STATIC_BS.flip(0)), whole_BQ)


def test_permuting_features_permutes_weights() -> None:
    model = tft()
    order_F = torch.randperm(NUM_FEATURES, generator=torch.Generator().manual_seed(2))
    permuted = copy.deepcopy(model)
    with torch.no_grad():
        for module in (permuted.selection.embed, permuted.selection.residuals):
            for parameter in module.parameters():
                parameter.copy_(parameter[order_F])
        weigh = permuted.selection.weigh
        assert isinstance(weigh.skip, nn.Linear)
        norm, gate = weigh.gate_add_norm.norm, weigh.gate_add_norm.gate
        weigh.hidden.weight.copy_(weigh.hidden.weight[:, order_F])
        weigh.skip.weight.copy_(weigh.skip.weight[order_F][:, order_F])
        both_halves = torch.cat([order_F, order_F + NUM_FEATURES])
        for parameter, order in (
            (weigh.skip.bias, order_F),
            (norm.weight, order_F),
            (norm.bias, order_F),
            (gate.weight, both_halves),
            (gate.bias, both_halves),
        ):
            parameter.copy_(parameter[order])
    original, other = model.forward_all(windows()), permuted.forward_all(windows()[..., order_F])
    torch.testing.assert_close(other.selection_BTF, original.selection_BTF[..., order_F])
    torch.testing.assert_close(other.quantiles_BTQ, original.quantiles_BTQ)


def test_closed_gate_gives_layer_norm_of_the_skip() -> None:
    block = GateAddNorm(5, 7, dropout=0.0)
    with torch.no_grad():
        block.gate.bias[7:] = -1e9
    skip_NO = torch.randn(3, 7)
    expected_NO = F.layer_norm(skip_NO, (7,), eps=1e-3)
    torch.testing.assert_close(block(torch.randn(3, 5), skip_NO), expected_NO)


def test_heads_share_their_values() -> None:
    """The output equals the mean of the heads computed one by one with the one value projection."""
    torch.manual_seed(0)
    attention = InterpretableAttention(8, 4).double()
    x_BTH = torch.randn(2, 5, 8, dtype=torch.float64)
    values_BTD = attention.value(x_BTH)
    assert values_BTD.shape == (2, 5, 2)
    heads = []
    for head in range(4):
        rows = slice(2 * head, 2 * head + 2)
        queries_BTD = F.linear(x_BTH, attention.query.weight[rows], attention.query.bias[rows])
        keys_BTD = F.linear(x_BTH, attention.key.weight[rows])
        heads.append(F.scaled_dot_product_attention(queries_BTD, keys_BTD, values_BTD, is_causal=True))
    output_BTH, _ = attention(x_BTH, 5)
    torch.testing.assert_close(output_BTH, attention.output(torch.stack(heads).mean(0)))


class LoopedGrn(nn.Module):
    """The gated residual network as the paper writes it."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.skip = nn.Identity() if in_dim == out_dim else nn.Linear(in_dim, out_dim)
        self.eta_2, self.eta_1 = nn.Linear(in_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim)
        self.gate, self.value = nn.Linear(hidden_dim, out_dim), nn.Linear(hidden_dim, out_dim)
        self.norm = nn.LayerNorm(out_dim, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        eta_1 = self.eta_1(F.elu(self.eta_2(x)))
        normed: Tensor = self.norm(self.skip(x) + torch.sigmoid(self.gate(eta_1)) * self.value(eta_1))
        return normed


class LoopedSelection(nn.Module):
    """Variable selection with one embedding and one network a feature, weights from flattened embeddings."""

    def __init__(self, num_features: int, hidden_dim: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(1, hidden_dim) for _ in range(num_features))
        self.networks = nn.ModuleList(
            LoopedGrn(hidden_dim, hidden_dim, hidden_dim) for _ in range(num_features)
        )
        self.weigh = LoopedGrn(num_features * hidden_dim, hidden_dim, num_features)

    def forward(self, x_BTF: Tensor) -> tuple[Tensor, Tensor]:
        embedded = [embed(x_BTF[..., f, None]) for f, embed in enumerate(self.embeddings)]
        weights_BTF = self.weigh(torch.cat(embedded, -1)).softmax(-1)
        transformed = [network(each) for network, each in zip(self.networks, embedded, strict=True)]
        return (torch.stack(transformed, -2) * weights_BTF.unsqueeze(-1)).sum(-2), weights_BTF


def as_batched(looped: LoopedSelection) -> dict[str, Tensor]:
    """The looped parameters as those of `VariableSelection`, differentiably."""
    embed_FH1 = torch.stack([e.weight for e in looped.embeddings])
    embed_bias_FH = torch.stack([e.bias for e in looped.embeddings])

    def stack(*path: str) -> Tensor:
        return torch.cat(
            [torch.stack([n.get_parameter(name) for n in looped.networks]) for name in path], dim=1
        )

    def fold(linear: nn.Linear) -> tuple[Tensor, Tensor]:
        """A map of the flattened embeddings as one of the features."""
        weight_OFH = linear.weight.unflatten(1, embed_bias_FH.shape)
        return (
            torch.einsum("ofh,fh->of", weight_OFH, embed_FH1.squeeze(-1)),
            linear.bias + torch.einsum("ofh,fh->o", weight_OFH, embed_bias_FH),
        )

    weigh = looped.weigh
    assert isinstance(weigh.skip, nn.Linear)
    skip_weight, skip_bias = fold(weigh.skip)
    hidden_weight, hidden_bias = fold(weigh.eta_2)
    return {
        "embed.weight": embed_FH1,
        "embed.bias": embed_bias_FH,
        "residuals.hidden.weight": stack("eta_2.weight"),
        "residuals.hidden.bias": stack("eta_2.bias"),
        "residuals.linear.weight": stack("eta_1.weight"),
        "residuals.linear.bias": stack("eta_1.bias"),
        "residuals.gate.weight": stack("value.weight", "gate.weight"),
        "residuals.gate.bias": stack("value.bias", "gate.bias"),
        "residuals.scale": stack("norm.weight"),
        "residuals.shift": stack("norm.bias"),
        "weigh.skip.weight": skip_weight,
        "weigh.skip.bias": skip_bias,
        "weigh.hidden.weight": hidden_weight,
        "weigh.hidden.bias": hidden_bias,
        "weigh.linear.weight": weigh.eta_1.weight,
        "weigh.linear.bias": weigh.eta_1.bias,
        "weigh.gate_add_norm.gate.weight": torch.cat([weigh.value.weight, weigh.gate.weight]),
        "weigh.gate_add_norm.gate.bias": torch.cat([weigh.value.bias, weigh.gate.bias]),
        "weigh.gate_add_norm.norm.weight": weigh.norm.weight,
        "weigh.gate_add_norm.norm.bias": weigh.norm.bias,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_selection_equals_the_looped_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    looped = LoopedSelection(NUM_FEATURES, 8).to(dtype)
    with torch.no_grad():
        for parameter in looped.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batched = VariableSelection(NUM_FEATURES, 8, dropout=0.0, has_context=False).to(dtype)
    x_BTF = windows(3).to(dtype).requires_grad_()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-10}

    results = []
    for outputs in (looped(x_BTF), torch.func.functional_call(batched, as_batched(looped), (x_BTF,))):
        mixed_BTH, weights_BTF = outputs
        loss = mixed_BTH.square().mean() + (weights_BTF * torch.arange(NUM_FEATURES)).square().mean()
        results.append((*outputs, *torch.autograd.grad(loss, [x_BTF, *looped.parameters()])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_gate_add_norm_sum_has_the_gradients_of_its_formula() -> None:
    torch.manual_seed(0)
    shapes = [(3, 5, 4), (3, 5, 8), (5, 3), (3, 4), (3, 4)]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(_GateAddNormSum.apply, inputs)


def test_quantile_loss_by_hand() -> None:
    prediction_BQ = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    target_B = torch.tensor([2.5, -1.0])
    quantiles_Q = torch.tensor([0.1, 0.5, 0.9])
    # First: errors 1.5, 0.5, -0.5 cost 0.15, 0.25, 0.05. Second: errors of -1 cost 0.9, 0.5, 0.1.
    each_B = quantile_loss(prediction_BQ, target_B, quantiles_Q, reduction="none")
    torch.testing.assert_close(each_B, torch.tensor([0.45, 1.5]))
    torch.testing.assert_close(quantile_loss(prediction_BQ, target_B, quantiles_Q), torch.tensor(1.95))
    torch.testing.assert_close(
        quantile_loss(prediction_BQ, target_B, quantiles_Q, reduction="mean"), torch.tensor(0.975)
    )


@pytest.mark.parametrize("static", [(), (3, 3)])
def test_gradient_of_a_batch_is_the_sum_over_its_split(static: tuple[int, ...]) -> None:
    model = tft(static_cardinalities=static)
    quantiles_Q = torch.tensor(model.config.quantiles, dtype=torch.float64)
    target_B = torch.linspace(-1, 1, 4, dtype=torch.float64)

    def accumulate(*batches: slice) -> list[Tensor]:
        for rows in batches:
            prediction_BQ = model(windows()[rows], STATIC_BS[rows] if static else None)
            quantile_loss(prediction_BQ, target_B[rows], quantiles_Q).backward()
        return gradients(model)

    whole = accumulate(slice(0, 4))
    split = accumulate(slice(0, 1), slice(1, 4))
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_every_parameter_has_a_gradient_of_its_own() -> None:
    """None is zero by construction: an adaptive optimizer would make steps out of its rounding noise."""
    model = tft(static_cardinalities=(3, 3))
    model(windows(), STATIC_BS).square().sum().backward()
    names = [name for name, _ in model.named_parameters()]
    for name, gradient in zip(names, gradients(model), strict=True):
        assert gradient.abs().max() > 1e-9, name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("static", [(), (3, 3)])
def test_gradient_checkpointing_changes_no_gradient(dropout: float, static: tuple[int, ...]) -> None:
    model = tft(dropout=dropout, static_cardinalities=static)
    results = []
    for switch in (False, True):
        model.gradient_checkpointing = switch
        torch.manual_seed(7)
        output_BQ = model(windows(), STATIC_BS if static else None)
        output_BQ.square().sum().backward()
        results.append([output_BQ.detach(), *gradients(model)])
    for kept, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)


def saved_bytes(model: nn.Module, x_BTF: Tensor) -> int:
    """Bytes of distinct storage that the graph of one forward pass keeps alive for the backward pass."""
    alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive[storage.data_ptr()] = (weakref.ref(tensor), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x_BTF)
    total = sum(nbytes for _, nbytes in alive.values())
    del output
    return total


def test_saved_activations_stay_within_the_stated_economy() -> None:
    """Six tensors of [F, N, H] with dropout (its mask is one), and next to none with checkpointing."""
    model = tft(dropout=0.1)
    x_BTF = windows(32)
    one_copy_bytes = x_BTF.numel() * 8 * x_BTF.element_size()
    assert saved_bytes(model, x_BTF) < 8 * one_copy_bytes
    model.gradient_checkpointing = True
    assert saved_bytes(model, x_BTF) < one_copy_bytes


def test_gradient_checkpointing_lowers_the_peak_of_a_step() -> None:
    model = tft(dropout=0.1)
    x_BTF = windows(64)
    peaks = []
    for switch in (False, True):
        model.gradient_checkpointing = switch
        model.zero_grad()
        with memory_budget(1 << 30) as budget:
            model(x_BTF).sum().backward()
            peaks.append(budget.peak_bytes)
    assert peaks[1] < 0.75 * peaks[0], peaks


def test_dropout_is_off_in_evaluation_and_the_seed_decides_it_in_training() -> None:
    model = tft(dropout=0.3)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(windows()))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert not torch.allclose(outputs[0], outputs[2])
    model.eval()
    torch.testing.assert_close(model(windows()), model(windows()), rtol=0, atol=0)


def test_dropout_sees_the_batch_in_dimension_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lets a mask be drawn for each block of samples, whatever the micro-batch."""
    rows = []
    original = F.dropout

    def recording(x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        rows.append(x.shape[0])
        return original(x, *arguments, **settings)

    monkeypatch.setattr(F, "dropout", recording)
    tft(dropout=0.1, static_cardinalities=(3, 3))(windows(), STATIC_BS)
    assert rows
    assert set(rows) <= {4, 4 * 6}


@pytest.mark.parametrize("static", [(), (3, 3)])
def test_state_dict_round_trip_and_seed(static: tuple[int, ...]) -> None:
    static_BS = STATIC_BS if static else None
    model, other = tft(static_cardinalities=static), tft(static_cardinalities=static)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(windows(), static_BS), other(windows(), static_BS))


def test_head_starts_at_the_given_quantiles() -> None:
    model = tft()
    values_Q = torch.tensor([-1e-4, 0.0, 2e-4], dtype=torch.float64)
    initialise_quantile_head(model, values_Q)
    torch.testing.assert_close(model(windows()), values_Q.expand(4, 3), rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_autocast(checkpointing: bool) -> None:
    model = tft().float()
    model.gradient_checkpointing = checkpointing
    exact_BQ = model(windows().float())
    with torch.autocast("cpu", torch.bfloat16):
        output_BQ = model(windows().float())
    output_BQ.square().sum().backward()
    assert output_BQ.dtype == torch.float32
    torch.testing.assert_close(output_BQ, exact_BQ, rtol=0.1, atol=0.1)
    assert all(gradient.isfinite().all() for gradient in gradients(model))


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"hidden_dim": 30, "num_heads": 4}, ["hidden_dim 30", "num_heads 4", "1, 2, 3, 5, 6, 10, 15"]),
        ({"quantiles": (0.5, 0.1)}, ["(0.5, 0.1)", "rise"]),
        ({"quantiles": (0.0, 0.5)}, ["between 0 and 1"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
        ({"num_features": 0}, ["num_features is 0"]),
        ({"static_cardinalities": (0,)}, ["static_cardinalities", "1 or more"]),
    ],
)
def test_wrong_sizes_are_named(settings: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        TftConfig(**({"num_features": 4} | settings))
    for text in texts:
        assert text in str(caught.value)


def test_missing_static_input_is_named() -> None:
    with pytest.raises(ValueError, match="missing"):
        tft(static_cardinalities=(3, 3))(windows())


def test_it_learns_a_rule_that_the_naive_forecast_cannot_know() -> None:
    torch.manual_seed(0)
    model = TemporalFusionTransformer(TftConfig(num_features=5, seq_len=4, hidden_dim=8, dropout=0.0))
    x_BTF = torch.randn(64, 4, 5)
    target_B = x_BTF[:, -1, 2]
    quantiles_Q = torch.tensor(model.config.quantiles)
    initialise_quantile_head(model, target_B.quantile(quantiles_Q))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = quantile_loss(model(x_BTF), target_B, quantiles_Q, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.forward_all(x_BTF).selection_BTF.mean((0, 1)).argmax()) == 2
