# Slurm gives no PATH.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# A directory that others could have made, or may write to, is not used: links in it lead anywhere.
mine() {
  [ -d "$1" ] && [ ! -L "$1" ] &&
    [ -z "$(find "$1" -prune \( ! -user "$(id -u)" -o -perm -020 -o -perm -002 \))" ]
}

# The record of a job, next to those of its earlier starts. $1: the line that says when it ended.
finish() {
  record=$spool/done/$name.rec
  start=0
  while [ -e "$record" ]; do
    start=$((start + 1))
    record=$spool/done/$name.$start.rec
  done
  {
    cat "$spool/live/$name.job"
    # Other letters would make it a binary file to grep.
    head -c 786432 "$spool/live/$name.tasks" | tr -cd '\n -~' |
      grep -E -e '^name [A-Za-z0-9._ -]{1,80}$' \
        -e '^task [0-9a-z]+\.[0-9]+ [0-9,-]+ [0-9,-]+ [a-z0-9:=|,-]+$'
    [ -z "$1" ] || echo "$1"
  } >"$spool/done/$name.part"
  mv "$spool/done/$name.part" "$record"
  rm -f "$spool/live/$name.job" "$spool/live/$name.tasks"
}

# No job waits for it longer than 5 s, whatever a driver or a disk does.
limited() {
  keep &
  work=$!
  (
    trap 'kill "$nap"; exit 0' TERM
    sleep 5 &
    nap=$!
    wait "$nap"
    kill -TERM $$
  ) &
  watch=$!
  trap 'exit 0' TERM
  wait "$work"
  kill "$watch"
}
