"""What train_parity.py measures beside ours, as scripts: a loop by hand, the Trainer, a peak."""

TORCHRUN = """
import json, sys, time, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
shape, sequence, batch, micro_batches, steps, out, compiled = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
mine = micro_batches // dist.get_world_size()
times = open(out, "w")
for step in range(steps):
    for micro in range(mine):
        ids = torch.randint(0, shape["vocab_size"], (batch, sequence))
        model.set_requires_gradient_sync(micro + 1 == mine)
        (model(input_ids=ids, labels=ids).loss / mine).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(time.time(), file=times, flush=True)
dist.destroy_process_group()
"""

TRAINER = """
import json, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
shape, sequence, batch, micro_batches, steps, out, compiled = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
times = open(out, "w")
class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 0:
            print(time.time(), file=times, flush=True)
rows = torch.randint(0, shape["vocab_size"], (steps * batch * micro_batches, sequence))
arguments = TrainingArguments(
    output_dir=out + ".d", max_steps=steps, per_device_train_batch_size=batch,
    gradient_accumulation_steps=micro_batches // 2, use_cpu=True, ddp_backend="gloo",
    optim="adamw_torch_fused", max_grad_norm=1.0, logging_strategy="no", save_strategy="no",
    report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
    torch_compile=compiled,
)
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(**shape)), args=arguments, callbacks=[Clock()],
    train_dataset=[{"input_ids": r, "labels": r} for r in rows],
)
trainer.train()
"""

PEAK = """
import sys, time, torch
torch.set_num_threads(1)
a = torch.randn(1024, 1024)
out = torch.empty_like(a)
torch.mm(a, a, out=out)
for _ in sys.stdin:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < float(sys.argv[1]):
        torch.mm(a, a, out=out)
        count += 1
    print(2 * 1024**3 * count / (time.perf_counter() - began), flush=True)
"""
