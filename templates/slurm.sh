#!/bin/bash
# The Slurm job of run @RUN@, as `stackrl launch` has written it.
# On each of its nodes `stackrl node` finds its roles by its rank; node 0, where this script runs, leads.
#
@DIRECTIVES@

set -uo pipefail
run=@FOLDER@
@EXPORTS@
# Nodes find each other by their addresses, which stand in the order of their ranks.
STACKRL_NODE_ADDRESSES=$(
  for nodes in @NODELISTS@; do
    for node in $(scontrol show hostnames "$nodes"); do
      scontrol show node --oneliner "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    done
  done | paste -sd,
)
export STACKRL_NODE_ADDRESSES

say() { echo "$(date '+%F %T') slurm job $SLURM_JOB_ID: $*"; }

# Before the time limit, or when Slurm wants the nodes for another job: the run saves and ends with 75.
leave() {
  say "the nodes will be taken away; the run saves and queues again"
  told=yes interrupted=yes
  touch "$run/preempt"
}

# `stackrl down`: node 0 saves and ends the run, also one that was about to queue again; where it has not
# begun yet, there is nothing to save.
stop() {
  say "told to end"
  over=yes interrupted=yes
  kill -TERM "$(cat "$run/lock")" || scancel "$SLURM_JOB_ID"
}

# Slurm ends or requeues the job, and has told all nodes' programs itself: this script waits for them.
cancelled() { over=yes interrupted=yes; }

told="" over="" interrupted=""
trap leave USR1
trap stop USR2
trap cancelled TERM

say "start ${SLURM_RESTART_COUNT:-0} on $STACKRL_NODE_ADDRESSES"
@SRUN@ &
step=$!
while
  interrupted=""
  wait "$step"
  code=$?
  [ "$interrupted" ]
do :; done

# Slurm gives the nodes to another job, and has told the nodes' programs to end, but not this script.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }
# Ended through no fault of the run's own, after enough time that doing it again is not in vain.
lost() { [ "$code" = 75 ] && [ "$SECONDS" -ge @PATIENCE@ ]; }

if [ "$code" != 0 ] && [ ! "$over" ] && { { [ "$told" ] && [ "$code" = 75 ]; } || preempted || lost; }; then
  say "ended with $code; queues again"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script
fi
say "ended with $code"
exit "$code"
