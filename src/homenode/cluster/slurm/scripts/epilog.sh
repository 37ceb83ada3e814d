#!/bin/sh
# homenode: Epilog, run by slurmd as root: closes the record
# It never fails: an Epilog that fails drains the node.
spool=@SPOOL@
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
case ${SLURMD_NODENAME:=$(hostname -s)} in '' | *[!A-Za-z0-9._-]*) exit 0 ;; esac
name=$SLURM_JOB_ID.$SLURMD_NODENAME
@ROOT@
keep() {
  umask 077
  mine "$spool" && mine "$spool/live" && mine "$spool/done" || exit
  [ ! -f "$spool/live/$name.job" ] || finish "end $(date +%s)"
}
# Not as words of a command: a shell would keep what they replace, and slurmd waits for its end.
exec </dev/null >/dev/null 2>&1
limited
exit 0
