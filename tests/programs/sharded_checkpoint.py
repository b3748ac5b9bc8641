"""Writes a checkpoint of torch.distributed with a tensor in parts, as one of two ranks."""

import sys

import torch
import torch.distributed as dist
from torch.distributed import tensor
from torch.distributed.checkpoint.state_dict_saver import save

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(7, 5)
state = {"model": {"fc.weight": tensor.distribute_tensor(whole, mesh, [tensor.Shard(0)]),
                   "fc.bias": tensor.distribute_tensor(whole[0].bfloat16(), mesh, [tensor.Replicate()])}}  # fmt: skip
save(state, checkpoint_id=f"{sys.argv[1]}/dcp")
dist.destroy_process_group()
