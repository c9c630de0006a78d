"""The scheduler by itself: three requests share 12 blocks until all of them have ended.

Run it with nothing but sagellm-scheduler-ir installed.
"""

from dataclasses import dataclass, replace

import numpy as np

from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, ScheduleIR, ScheduleRequest, SchedulerPassProtocol

BLOCK_SIZE, TOTAL_BLOCKS = 4, 12


@dataclass(frozen=True)
class ShortestFirst(SchedulerPassProtocol):
    """Admits the shortest prompt first; each second of waiting counts as much as some tokens less."""

    tokens_per_second: float = 100.0
    name = "shortest_first"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        waited = ir.now - ir.pending.arrived_time
        return ir.order_pending(np.argsort(ir.pending.num_tokens - self.tokens_per_second * waited))


scheduler = BaseSchedulerIR(max_num_batched_tokens=16, max_num_seqs=4, block_size=BLOCK_SIZE)
scheduler.add_optimization_pass(ShortestFirst())
pending = [
    ScheduleRequest("chat", range(10), max_tokens=12, arrived_time=0.0),
    ScheduleRequest("batch", range(20), max_tokens=8, arrived_time=0.0, priority=-1),
    ScheduleRequest("late", range(6), max_tokens=6, arrived_time=0.0),
]
running: list[ScheduleRequest] = []
free_blocks = TOTAL_BLOCKS

step = 0
while pending or running:
    plan = scheduler.schedule(
        pending_requests=pending, running_requests=running, available_memory=free_blocks
    )
    for request in plan.preempted_requests:
        running.remove(request)
        pending.insert(0, replace(request, num_blocks=0, num_computed_tokens=0))
        free_blocks += request.num_blocks
    for request, num_tokens, num_new_blocks in plan.scheduled_requests:
        (pending if request in pending else running).remove(request)
        num_computed = request.num_computed_tokens + num_tokens
        is_sampled = num_computed == request.num_tokens  # a model would sample a token
        request = replace(
            request,
            num_blocks=request.num_blocks + num_new_blocks,
            num_computed_tokens=num_computed,
            num_tokens=request.num_tokens + is_sampled,
            last_scheduled_step=plan.step,
        )
        free_blocks -= num_new_blocks
        if request.num_tokens - len(request.token_ids) == request.max_tokens:
            free_blocks += request.num_blocks
        else:
            running.append(request)
    work = ", ".join(f"{entry.request_id} +{entry.num_tokens}" for entry in plan.scheduled_requests)
    preempted = "".join(f"  preempted {request.request_id}" for request in plan.preempted_requests)
    print(f"step {step:2}: {work or 'nothing'}  [{free_blocks} blocks free]{preempted}")
    step += 1

print(scheduler.metrics())
assert free_blocks == TOTAL_BLOCKS
