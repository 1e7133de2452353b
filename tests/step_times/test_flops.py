"""The operations of a step, counted: against numbers worked out by hand, and with no number of the
step changed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddpkit.errors import ConfigError
from ddpkit.step_times import TF32, FlopCounter, device_peak


class Attention(nn.Module):
    def forward(self, inputs):
        return functional.scaled_dot_product_attention(inputs, inputs, inputs)


BLOCK = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
OF_BLOCK = 2 * 5 * (3 * 4 + 4 * 2)  # forwards, of 5 rows


def tensor(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), requires_grad=True)


def run(net, inputs):
    outputs = net(inputs)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    outputs.sum().backward()


LSTM_WEIGHTS = 20 * 3 + 20 * 5  # 4 gates of 5, of 3 inputs and 5 of the step before
BY_HAND = {
    # Two operations for each product of a row and a column; the backward pass has two such
    # products.
    "linear": (nn.Linear(3, 4), (5, 3), 3 * 2 * 5 * 3 * 4),
    # 2 images, 6 x 6 places, kernels of 3 channels x 3 x 3, 4 of them.
    "convolution": (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), 3 * 2 * 2 * 6 * 6 * 3 * 3 * 3 * 4),
    # In groups a kernel sees one channel.
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (2, 8, 8, 8), 3 * 2 * 2 * 6 * 6 * 3 * 3 * 8),
    # Each place of the input meets a whole kernel.
    "transposed": (
        nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2),
        (2, 8, 5, 5),
        3 * 2 * 2 * 5 * 5 * 8 * 2 * 3 * 3,
    ),
    "lstm": (nn.LSTM(3, 5), (7, 2, 3), 3 * 2 * 7 * 2 * LSTM_WEIGHTS),
    # Scores and values forwards: 2 products; backwards 5, as the scores are computed again.
    "attention": (Attention(), (2, 4, 6, 8), (2 + 5) * 2 * 2 * 4 * 6 * 6 * 8),
}


@pytest.mark.parametrize(("net", "shape", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_the_count_is_that_of_pencil_and_paper(net, shape, expected):
    with FlopCounter() as counter:
        run(net, tensor(*shape))
    assert counter.total == expected
    assert not counter.problem


def test_a_first_layer_whose_input_needs_no_gradient_has_one_product_less():
    with FlopCounter() as counter:
        run(nn.Linear(3, 4), torch.ones(5, 3))
    assert counter.total == 2 * 2 * 5 * 3 * 4


def test_a_gradient_of_a_gradient_and_a_checkpointed_block_are_counted():
    layer = nn.Linear(3, 4, bias=False)
    inputs = tensor(5, 3)
    forward = 2 * 5 * 3 * 4
    with FlopCounter() as counter:
        outputs = layer(inputs)
        (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    assert counter.total > 3 * forward
    with FlopCounter() as counter:
        checkpoint(BLOCK, inputs, use_reentrant=False).sum().backward()
    assert counter.total == 3 * OF_BLOCK + 2 * 5 * 3 * 4  # what the second layer needs, again


def test_what_is_computed_again_can_be_left_out():
    is_repeated = False

    def note(begins):
        nonlocal is_repeated
        is_repeated = begins

    class Again:
        def __enter__(self):
            note(begins=True)

        def __exit__(self, *_):
            note(begins=False)

    with FlopCounter(lambda: is_repeated) as counter:
        contexts = (torch.autograd.profiler.record_function("first"), Again())
        outputs = checkpoint(BLOCK, tensor(5, 3), use_reentrant=False, context_fn=lambda: contexts)
        outputs.sum().backward()
    assert counter.total == 3 * OF_BLOCK


def gradients(count):
    torch.manual_seed(5)
    parts = (
        nn.Conv1d(4, 6, 3),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    net = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for number in range(3):
        if number == 1 and count:
            with FlopCounter():
                run(net, torch.randn(5, 4, 8))
        else:
            run(net, torch.randn(5, 4, 8))
        optimizer.step()
    return [*net.parameters(), *net.buffers(), torch.get_rng_state()]


def test_no_bit_of_a_training_is_another():
    assert all(map(torch.equal, gradients(count=True), gradients(count=False)))


def test_what_hides_its_operations_makes_the_count_unknown():
    layer = nn.Linear(3, 4)
    with FlopCounter() as counter, torch.inference_mode():
        layer(torch.ones(5, 3))
    assert counter.problem == "a part of it runs in torch.inference_mode"


def test_a_torch_that_would_lose_the_gradients_of_a_branch_is_refused(monkeypatch):
    counter = FlopCounter()
    monkeypatch.delattr(TorchDispatchMode, "ignore_compile_internals", raising=False)
    with pytest.raises(ConfigError, match="runs cond another way .* Leave --count_flops out"):
        counter.__torch_dispatch__(torch.ops.higher_order.cond, ())


def test_a_formula_that_fails_leaves_the_step_alone(monkeypatch):
    def fails(*_, **__):
        raise AssertionError("shapes")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.mm, fails)
    with FlopCounter() as counter:
        product = torch.ones(2, 3) @ torch.ones(3, 5)
    assert product.sum() == 30
    assert counter.problem == "the formula of aten.mm.default has failed: AssertionError: shapes"


# --------------------------------------------------------------------------------- peaks of devices


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("Tesla V100-SXM2-32GB", TF32, None),
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312),
        ("A100-SXM4-40GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", TF32, 156),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA L4", torch.float16, 121),
        ("NVIDIA L40S", torch.float16, 362.05),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H200", torch.float32, 67),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("AMD Instinct MI250X", torch.bfloat16, 191.5),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA H200", torch.int8, None),
        ("Intel(R) Data Center GPU Max 1550", torch.bfloat16, None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_datasheet(name, dtype, tera):
    assert device_peak(name, dtype) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    ("name", "both", "tf32"),
    [("3090", 71.2, 35.6), ("4090", 165.2, 82.6), ("5090", 209.5, 104.8)],
)
def test_the_peaks_of_a_geforce_are_those_of_the_architectures_paper(name, both, tf32):
    for dtype, tera in (
        (torch.float16, both),
        (torch.bfloat16, both),
        (TF32, tf32),
        (torch.float32, tf32),
    ):
        assert device_peak(f"NVIDIA GeForce RTX {name}", dtype) == pytest.approx(
            tera * 1e12,
            rel=1e-3,
        )


def test_the_peak_of_a_mix_is_the_operations_by_the_time_that_each_part_takes_at_its_own():
    with FlopCounter() as counter:
        torch.ones(2, 3) @ torch.ones(3, 5)  # 60 in float32
        torch.ones(2, 3).bfloat16() @ torch.ones(3, 5).bfloat16()  # 60 in bfloat16
    seconds = 60 / 19.5e12 + 60 / 312e12
    assert counter.peak("NVIDIA A100-SXM4-40GB") == pytest.approx(120 / seconds)
    assert counter.peak("cpu") is None
    assert counter.peak("Tesla V100-SXM2-16GB") is None  # it has no bfloat16
    assert FlopCounter().peak("NVIDIA A100-SXM4-40GB") is None  # nothing was counted


def test_float32_is_held_against_tf32_where_torch_is_told_to_use_it():
    convolution = nn.Conv1d(1, 1, 1)
    with FlopCounter() as convolved:  # torch uses TF32 there by itself
        convolution(torch.ones(1, 1, 3))
    with FlopCounter() as multiplied:
        torch.ones(2, 3) @ torch.ones(3, 5)
    name = "NVIDIA A100-SXM4-40GB"
    assert convolved.peak(name) == pytest.approx(156e12)
    assert multiplied.peak(name) == pytest.approx(19.5e12)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert multiplied.peak(name) == pytest.approx(156e12)
        assert multiplied.peak("Tesla T4") == pytest.approx(8.1e12)  # it has none
    finally:
        torch.set_float32_matmul_precision(before)
