"""Graphs as inputs: objects that are no tensors, collated and moved by their own methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import (
    Batch,
    BatchConfig,
    CheckpointConfig,
    ClassificationTask,
    ConfigError,
    DataError,
    DatasetOptions,
    MeanLoss,
    SampleReader,
    build_trainer,
    start_run,
)
from accel_trainer.data.loader import DeviceCopy
from tests import processes, workload
from tests.training.test_exactness import final_files


class Graph:
    """As in torch_geometric: no tensor and no mapping, with a method `to` and nothing else."""

    def __init__(self, nodes: Tensor, edges: Tensor, graph_of: Tensor) -> None:
        self.nodes = nodes  # [num_nodes, 3]
        self.edges = edges  # [2, num_edges]
        self.graph_of = graph_of  # [num_nodes]

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device), self.edges.to(device), self.graph_of.to(device))


class Graphs:
    """Rings of 2 to 6 nodes."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[Graph, int]:
        num_nodes = 2 + index % 5
        nodes = torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(index))
        ring = torch.arange(num_nodes)
        return Graph(nodes, torch.stack([ring, ring.roll(1)]), torch.zeros_like(ring)), index % 3


def join_graphs(samples: list[tuple[Graph, int]]) -> tuple[Graph, Tensor]:
    graphs, labels = zip(*samples, strict=True)
    sizes = torch.tensor([len(graph.nodes) for graph in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    joined = Graph(
        torch.cat([graph.nodes for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], 1),
        torch.arange(len(graphs)).repeat_interleave(sizes),
    )
    return joined, torch.tensor(labels)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.num_graphs = 4

    def forward(self, graph: Graph) -> Tensor:
        sources, targets = graph.edges
        nodes = graph.nodes.index_add(0, targets, graph.nodes[sources])
        pooled = nodes.new_zeros(self.num_graphs, 3).index_add(0, graph.graph_of, nodes)
        return self.linear(pooled)


def test_an_object_that_can_move_moves_with_the_tensors_at_any_depth() -> None:
    meta = torch.device("meta")
    graph, labels = join_graphs([Graphs(4)[index] for index in range(4)])
    for wrap in (lambda graph: graph, lambda graph: [1, (graph,)], lambda graph: {"a": graph}):
        batch = Batch(wrap(graph), {"labels": labels}, torch.arange(4))
        for moved in (batch.to(meta), DeviceCopy(meta)(batch)):
            (found,) = graphs_in(moved.inputs)
            assert found.nodes.is_meta
            assert found.edges.is_meta
            assert moved.targets["labels"].is_meta
    assert not graph.nodes.is_meta


def graphs_in(value: Any) -> list[Graph]:
    if isinstance(value, Graph):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [graph for part in parts if not isinstance(part, int) for graph in graphs_in(part)]


def train(folder: Path, options: DatasetOptions) -> None:
    config = workload.make_config(
        folder,
        batch=BatchConfig(per_device_batch_size=4, global_batch_size=4, eval_batch_size=4),
        checkpoint=CheckpointConfig(),
    )
    config = replace(config, trainer=replace(config.trainer, max_steps=4))
    with start_run(config, recipe="graphs") as run:
        build_trainer(
            run,
            model=GraphNet(),
            task=ClassificationTask(),
            train_set=Graphs(16),
            eval_sets=Graphs(8),
            metrics=[MeanLoss()],
            options=options,
        ).fit()


def test_graphs_train_on_an_accelerator_as_on_a_cpu(tmp_path: Path) -> None:
    options = DatasetOptions(collate=join_graphs)
    train(tmp_path / "cpu", options)
    processes.run_on("pretend", train, tmp_path / "accelerator", options, folder=tmp_path)
    on_cpu, on_accelerator = (final_files(tmp_path / name) for name in ("cpu", "accelerator"))
    assert on_cpu["model.safetensors"] == on_accelerator["model.safetensors"]


def test_graphs_that_torch_cannot_collate_lead_to_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA_SAMPLE\]: .*'Graph'.*DatasetOptions\(collate=") as e:
        train(tmp_path, DatasetOptions())
    assert "\n" not in str(e.value)


def test_a_process_without_a_graph_is_one_line() -> None:
    options = DatasetOptions(collate=join_graphs)
    reader = SampleReader(Graphs(5), torch.device("cpu"), seed=0, collate=options.collate)
    with pytest.raises(ConfigError, match="no sample in this step, and a Graph.*--batch.drop-last"):
        next(reader.read([torch.empty(0, dtype=torch.long)], 0))
