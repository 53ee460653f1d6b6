"""A process of its own: what vLLM's models hold on every worker of some layouts, built with weights of no meaning.

Reads [[config.json as an object, tp, pp, expert_parallel], ...] from stdin; the last line of stdout is, for each case
and each rank:
    shapes: {parameter name: shape}
    described: what the receiver makes of the model's layers, a LocalTensor for each parameter, as an object
    differs, moved: parameters in which received weights are not those that vLLM itself loads from a checkpoint, and
        those whose address has changed
The other workers are a process group that only says that they are there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def parameters(config: dict[str, Any], tp: int, pp: int, expert_parallel: bool, folder: Path) -> list[Found]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megagent.parallel.reshard.live import describe
    from megagent.parallel.reshard.vllm import Workers

    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    found = []
    for rank in range(tp * pp):
        vllm_config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            enable_expert_parallel=expert_parallel,
            distributed_executor_backend="mp",
        ).create_engine_config()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp)
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(tp * pp, rank, "env://", rank, "gloo")
            parallel_state.initialize_model_parallel(tp, pp)
            with set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(vllm_config)
            shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
            described = [asdict(each.tensor) for each in describe(model).values()]
            workers = Workers(tp, pp, expert_parallel=expert_parallel)
            found.append({"shapes": shapes, "described": described, **received(model, config, workers, rank)})
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def received(model: Any, config: dict[str, Any], workers: Any, rank: int) -> Found:
    """Weights by the receiver, in place as on CUDA, and then the same ones by vLLM's own loader."""
    import torch

    from megagent.parallel.models import architecture_of
    from megagent.parallel.reshard import files, vllm
    from megagent.parallel.reshard.apply import Incoming, InPlace
    from megagent.parallel.reshard.live import describe
    from megagent.parallel.reshard.plan import make_plan
    from megagent.parallel.reshard.rounds import cut_rounds

    architecture = architecture_of(config)
    generator = torch.Generator().manual_seed(7)
    full = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in architecture.hf_shapes().items()
    }

    class End:
        def fetch(self, copies: Any, destination: Any) -> int:
            for copy in copies:
                destination(copy).copy_(full[copy.source][copy.source_slices])
            return 0

        def finish(self) -> None:
            pass

    source = files.layout([{name: ("BF16", tuple(tensor.shape)) for name, tensor in full.items()}])
    plan = make_plan(source, vllm.layout(architecture, workers))
    plan.check()
    live = describe(model)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(7.0)
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    Incoming(cut_rounds(plan, 3000), rank, live).receive(End(), InPlace(live), 1)  # type: ignore[arg-type]
    ours = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data.fill_(9.0)
    model.load_weights(full.items())
    return {
        "differs": [name for name, parameter in parameters.items() if not torch.equal(parameter, ours[name])],
        "moved": [name for name, parameter in parameters.items() if parameter.data_ptr() != addresses[name]],
    }


def pretend_that_the_others_are_there() -> None:
    """Every group is one that only says so, and what asks the other workers is answered here."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def quiet_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    dist.new_group = fake_group
    parallel_state.init_model_parallel_group = quiet_group
    parallel_state.in_the_same_node_as = lambda *_, **__: [True] * dist.get_world_size()
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ["VLLM_PLUGINS"] = ""
    pretend_that_the_others_are_there()
    with tempfile.TemporaryDirectory() as folder:
        results = [parameters(*case, folder=Path(folder)) for case in json.load(sys.stdin)]
    print("\n" + json.dumps(results))
