"""The scheduler by itself: three requests share 12 blocks until all of them have ended.

Run it with nothing but sagellm-scheduler-ir installed.
"""

from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, ScheduleRequest

BLOCK_SIZE, TOTAL_BLOCKS = 4, 12

scheduler = BaseSchedulerIR(max_num_batched_tokens=16, max_num_seqs=4, block_size=BLOCK_SIZE)
pending = [
    ScheduleRequest("chat", range(10), max_tokens=12, arrived_time=0.0),
    ScheduleRequest("batch", range(20), max_tokens=8, arrived_time=1.0, priority=-1),
    ScheduleRequest("late", range(6), max_tokens=6, arrived_time=2.0),
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
        pending.insert(0, request)
        free_blocks += request.num_blocks
        request.num_blocks = request.num_computed_tokens = 0
    for request, num_tokens, num_new_blocks in plan.scheduled_requests:
        if request in pending:
            pending.remove(request)
            running.append(request)
        free_blocks -= num_new_blocks
        request.num_blocks += num_new_blocks
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1  # a model would sample this token
        if request.num_tokens - len(request.token_ids) == request.max_tokens:
            running.remove(request)
            free_blocks += request.num_blocks
    work = ", ".join(f"{entry.request_id} +{entry.num_tokens}" for entry in plan.scheduled_requests)
    preempted = "".join(f"  preempted {request.request_id}" for request in plan.preempted_requests)
    print(f"step {step:2}: {work or 'nothing'}  [{free_blocks} blocks free]{preempted}")
    step += 1

print(scheduler.metrics())
assert free_blocks == TOTAL_BLOCKS
