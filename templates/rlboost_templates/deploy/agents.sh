# Runs this machine's agents until all have ended, then gives the machine up, so that a machine that its head has
# forgotten costs nothing. The arguments are the instances, such as spot-3/0.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${RLBOOST_ROOT:-$HOME/.rlboost}
work=$root/machine
mkdir -p "$work"
chmod 700 "$work"
install -m 600 "$here/bootstrap.json" "$work/bootstrap.json"
rm -f "$here/bootstrap.json"

echo $$ > "$root/agents.pid"

agents=()
trap 'kill -TERM "${agents[@]}" 2> /dev/null' TERM INT
for instance in "$@"; do
  log=$work/agent-${instance##*/}.log
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$root/venv/bin/python" -m rlboost_runtime.agent \
    "$work/bootstrap.json" "$instance" >> "$log" 2>&1 &
  agents+=($!)
done
status=0
for agent in "${agents[@]}"; do
  while kill -0 "$agent" 2> /dev/null; do wait "$agent" || status=$?; done
done
tail -n 3 "$work"/agent-*.log
echo "agents ended with $status; giving the machine up"
[ "${RLBOOST_KEEP_MACHINE:-no}" = yes ] || sudo -n shutdown -h now || true
exit "$status"
