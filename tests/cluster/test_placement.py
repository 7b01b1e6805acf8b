"""What engines need of a node, their names in the cluster, and what is said when there is no room."""

from typing import Any

import pytest

from llmbackend.cluster.messages import engine_key
from llmbackend.cluster.rank_actors import actor_options, fits, insufficient_resources, needs, placement_problem
from llmbackend.engine.config import EngineConfig

NODES = [
    {"Alive": alive, "NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": address, "Resources": resources}
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
    text = insufficient_resources({"CPU": 16.0, "GPU": 0.0}, NODES, {"a": {"CPU": 3.0}, "c": {"CPU": 1.0, "GPU": 2.0}})
    assert "needs 16 CPU;" in text
    assert "a (10.0.0.1) 4 CPU and 0 GPU, free 3 CPU and 0 GPU, c (10.0.0.3) 8 CPU and 2 GPU, free 1 CPU" in text
    assert "10.0.0.2" not in text, "a dead node has no room"


def test_room_is_that_of_one_living_node() -> None:
    wanted = {"CPU": 4.0, "GPU": 0.0}
    assert placement_problem(wanted, NODES, {"a": {"CPU": 3.0}, "c": {"CPU": 3.0}}), "together they would have it"
    assert placement_problem(wanted, NODES, {"b": {"CPU": 64.0}})
    assert not placement_problem(wanted, NODES, {"a": {"CPU": 3.0}, "c": {"CPU": 4.0}})


def test_a_resource_that_no_node_has_is_named() -> None:
    wanted = needs(EngineConfig(model="/m", cluster_resources={"tape drive": 1}))
    assert "needs 1 CPU and 1 tape drive (no node has any tape drive)" in placement_problem(
        wanted, NODES, {"c": {"CPU": 8.0}}
    )


def test_a_model_may_say_what_its_engines_take() -> None:
    config = EngineConfig(
        model="/m",
        device="cuda",
        cluster_resources={"CPU": 0, "GPU": 0.5, "memory": 1e9, "accelerator_type:H100": 0.001},
    )
    assert actor_options(needs(config)) == {
        "num_cpus": 0,
        "num_gpus": 0.5,
        "memory": 1e9,
        "resources": {"accelerator_type:H100": 0.001},
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"cluster_resources": {"CPU": -1}}, "has -1 of 'CPU', expected a resource's name and a number of at least 0"),
        ({"cluster_resources": {"": 1}}, "has 1 of ''"),
        ({"cluster_resources": {"GPU": 1}}, "has 1 of 'GPU', expected none where 'device' is 'cpu'"),
        ({"cluster_resources": {"GPU": 0}, "device": "cuda"}, "has 0 of 'GPU', expected more where 'device' is 'cuda'"),
        ({"cluster_resources": {"GPU": 2}, "device": "cuda"}, "expected at most 1: each rank has one"),
    ],
)
def test_resources_that_make_no_sense_are_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(model="/m", **arguments)


def test_equal_configurations_have_the_same_engines() -> None:
    one, other = EngineConfig(model="mock"), EngineConfig(model="mock", seed=1)
    assert engine_key(0, one) == engine_key(0, EngineConfig(model="mock"))
    assert len({engine_key(0, one), engine_key(1, one), engine_key(0, other)}) == 3
