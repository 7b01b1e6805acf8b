"""What engines need of a node, their names in the cluster, and what is said when there is no room."""

from llmbackend.cluster.messages import engine_key
from llmbackend.cluster.placement import fits, needs, no_room
from llmbackend.engine.config import EngineConfig

NODES = [
    {"Alive": alive, "NodeManagerHostname": name, "NodeManagerAddress": address, "Resources": resources}
    for alive, name, address, resources in (
        (True, "a", "10.0.0.1", {"CPU": 4.0}),
        (False, "b", "10.0.0.2", {"CPU": 64.0}),
        (True, "c", "10.0.0.3", {"CPU": 8.0, "GPU": 2.0}),
    )
]


def test_threads_and_devices_are_needed() -> None:
    assert needs(EngineConfig(model="mock")) == {"CPU": 1.0, "GPU": 0.0}
    assert needs(EngineConfig(model="mock", num_threads=6)) == {"CPU": 6.0, "GPU": 0.0}
    assert needs(EngineConfig(model="/m", device="cuda:1")) == {"CPU": 1.0, "GPU": 1.0}
    assert needs(EngineConfig(model="/m", device="cuda", tensor_parallel_size=4)) == {"CPU": 1.0, "GPU": 1.0}, (
        "of a rank"
    )


def test_what_is_free_must_be_enough_of_each() -> None:
    assert fits({"CPU": 2.0, "GPU": 0.0}, {"CPU": 2.0})
    assert not fits({"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0})
    assert not fits({"CPU": 2.0, "GPU": 0.0}, {"CPU": 1.5, "GPU": 1.0})


def test_no_room_names_what_is_needed_free_and_there() -> None:
    text = no_room({"CPU": 16.0, "GPU": 0.0}, NODES, {"CPU": 3.0, "GPU": 2.0})
    assert "needs 16 CPU;" in text
    assert "free in the whole cluster: 3 CPU and 2 GPU" in text
    assert "a (10.0.0.1) 4 CPU and 0 GPU, c (10.0.0.3) 8 CPU and 2 GPU" in text
    assert "10.0.0.2" not in text, "a dead node has no room"


def test_equal_configurations_have_the_same_engines() -> None:
    one, other = EngineConfig(model="mock"), EngineConfig(model="mock", seed=1)
    assert engine_key(0, one) == engine_key(0, EngineConfig(model="mock"))
    assert len({engine_key(0, one), engine_key(1, one), engine_key(0, other)}) == 3
