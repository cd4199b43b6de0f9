"""Live storages are counted once, under the right category, on real and on fake tensors alike."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.engine.measure.allocator_memory import CpuMemoryMeter
from workbench.engine.measure.live_memory import LiveBytes


def test_views_and_in_place_count_once() -> None:
    with LiveBytes() as live:
        a = torch.empty(100)
        b = a.view(10, 10).t()[2:]
        a.add_(1)
        assert live.current == {"temporary": 400}
        del a
        assert live.current == {"temporary": 400}
        c = b + 1
        assert live.current == {"temporary": 400 + 320}
        del b, c
        assert live.current == {}
        assert live.peak == {"temporary": 720}


def test_storages_from_before_the_mode_are_overhead_unless_registered() -> None:
    known, unknown = torch.zeros(10), torch.zeros(20)
    with LiveBytes() as live:
        live.register([known, known.view(2, 5)], "parameters")
        kept = [known[2:], unknown[5:]]
        assert live.current == {"parameters": 40, "overhead": 80}
        live.register(unknown, "optimizer")
        assert live.current == {"parameters": 40, "optimizer": 80}
    del known, unknown
    kept.clear()
    assert live.current == {}


def test_resizing_is_followed() -> None:
    with LiveBytes() as live:
        a = torch.empty(10)
        a.resize_(30)
        assert live.current == {"temporary": 120}
        del a
        assert live.current == {}


def test_actions_and_scopes_decide_a_storages_category() -> None:
    with LiveBytes() as live:
        with live.action("F"):
            kept = torch.zeros(100) + 1
            with live.category("communication"):
                received = torch.zeros(30)
                with live.category("logits"):
                    logits = torch.zeros(50)
        assert live.current == {"activations": 400, "communication": 120, "logits": 200}
        # torch.zeros(100) died in its action, while 400 bytes of the survivor stood beside it.
        assert live.peak == {"temporary": 400, "activations": 400}
        assert live.maximum["temporary"] == 400
        with live.action("B"):
            sent = torch.zeros(7)
            del kept
        assert live.current == {"communication": 148, "logits": 200}
        live.register(sent, "gradients")
        assert live.current == {"gradients": 28, "communication": 120, "logits": 200}
        with live.action("OPTIMIZER"):
            scratch = torch.zeros(9)
        assert live.current["temporary"] == 36
        del received, logits, scratch


def test_peak_is_one_instant_and_maximum_each_its_own() -> None:
    with LiveBytes() as live:
        with live.category("a"):
            a = torch.empty(100)
        del a
        with live.category("b"):
            b = torch.empty(60)
        with live.category("a"):
            c = torch.empty(50)
        assert live.peak == {"b": 240, "a": 200}
        assert live.maximum == {"a": 400, "b": 240}
        live.snapshot("before_optimizer")
        del c
        live.restart()
        assert live.peak == live.maximum == live.current == {"b": 240}
        assert live.moments == {}
        live.snapshot("forward_end")
        rows = live.memory_rows(2)
        assert rows[0] == {
            "stage": 2,
            "moment": "forward_end",
            "tier": "device",
            "category": "b",
            "bytes": 240,
        }
        assert [row["moment"] for row in rows] == ["forward_end", "peak", "maximum"]
        del b


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 32), nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 50)
    )


def train(
    live: LiveBytes, net: nn.Module, tokens: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Two steps of three microbatches, the second one counted from its start."""
    for step in range(2):
        if step:
            live.restart()
        for microbatch in tokens:
            with live.action("F"):
                with live.category("logits"):
                    logits = net(microbatch)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), microbatch.flatten())
            with live.action("B"):
                loss.backward()
                live.register([p.grad for p in net.parameters() if p.grad is not None], "gradients")
        del logits, loss
        with live.action("OPTIMIZER"):
            optimizer.step()
        if step == 0:
            live.register([t for s in optimizer.state.values() for t in s.values()], "optimizer")
        live.snapshot("after_optimizer")


def counted() -> LiveBytes:
    live = LiveBytes()
    with live:
        with live.category("parameters"):
            net = model()
        with live.category("activations"):
            tokens = torch.zeros(3, 8, 16, dtype=torch.int64)
        train(live, net, tokens, torch.optim.AdamW(net.parameters(), fused=True))
    return live


def test_training_step_equals_the_allocator() -> None:
    counted()
    meter = CpuMemoryMeter()
    meter.start()
    live = LiveBytes()
    with live:
        net = model()
        live.register(net.parameters(), "parameters")
        tokens = torch.zeros(3, 8, 16, dtype=torch.int64)
        live.register(tokens, "activations")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        train(live, net, tokens, optimizer)
    meter.mark("end")
    measured = meter.stop()
    assert sum(live.current.values()) == pytest.approx(measured.at("end"), rel=0.01)
    total = sum(p.nbytes for p in net.parameters())
    assert live.current["parameters"] == live.current["gradients"] == total
    assert live.current["optimizer"] == 2 * total + 4 * len(list(net.parameters()))


@pytest.mark.parametrize("counting", [True, False])
def test_peak_equals_the_allocator(counting: bool) -> None:
    """The allocator's peak, whether the counting mode is on or off: the counter does not change
    what it counts.
    """
    expected = sum(counted().peak.values())
    meter, live = CpuMemoryMeter(), LiveBytes()
    meter.start()
    net, tokens = model(), torch.zeros(3, 8, 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    if counting:
        with live:
            train(live, net, tokens, optimizer)
    else:
        train(live, net, tokens, optimizer)
    assert meter.stop().peak == pytest.approx(expected, rel=0.01)


def test_fake_tensors_give_the_same() -> None:
    real = counted()
    with FakeTensorMode():
        fake = counted()
    assert fake.peak == real.peak
    assert fake.maximum == real.maximum
    assert fake.moments == real.moments
    assert set(real.maximum) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "temporary",
    }


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_with_group_bytes_and_action(fake: bool) -> None:
    group = dist.new_group(list(range(8)))
    live = LiveBytes()
    with FakeTensorMode() if fake else nullcontext(), live:
        x = torch.zeros(16, 4, dtype=torch.bfloat16)
        with live.action("REDUCE_GRAD"):
            for _ in range(3):
                dist.all_reduce(x, group=group)
            dist.all_reduce(torch.zeros(2))
        with live.action("F"), live.category("gathered"):
            whole = torch.zeros(128, 4)
            dist.all_gather_into_tensor(whole, torch.zeros(16, 4), group=group)
            dist.reduce_scatter_tensor(torch.zeros(16, 4), whole, group=group)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, x, group=group, group_peer=1),
                dist.P2POp(dist.isend, x, group=group, group_peer=2),
            ]
        ):
            work.wait()
        dist.barrier(group=group)
    rows = live.collective_rows({group.group_name: "tensor"})
    seen = [
        (r["axis"], r["kind"], r["group_size"], r["dtype"], r["bytes"], r["count"], r["action"])
        for r in rows
    ]
    assert seen == [
        ("tensor", "all_reduce", 8, "bf16", 128, 3, "REDUCE_GRAD"),
        ("world", "all_reduce", 64, "fp32", 8, 1, "REDUCE_GRAD"),
        ("tensor", "all_gather", 8, "fp32", 2048, 1, "F"),
        ("tensor", "reduce_scatter", 8, "fp32", 2048, 1, "F"),
        ("tensor", "recv", 8, "bf16", 128, 1, ""),
        ("tensor", "send", 8, "bf16", 128, 1, ""),
        ("tensor", "barrier", 8, rows[-1]["dtype"], 0, 1, ""),
    ]
    assert live.current["gathered"] == 2048
