#!/bin/bash
# Start-up script of a spot machine, or of a further node of the trainer: run by cloud-init (AWS) or the guest
# agent (Google Cloud), as root.
# It takes no connection from outside. When its agents have ended, for whatever reason, so has the machine:
# an agent without contact to the head for 15 minutes ends by itself.
set -uo pipefail
umask 077
root="${RLBOOST_ROOT:-/opt/rlboost}"
mkdir -p "$root"
cd "$root" || exit 1

base64 -d <<'END' | gunzip > bootstrap.json
@BOOTSTRAP@
END
cat > local_nvme.sh <<'END'
@LOCAL_NVME@
END
bash local_nvme.sh < /dev/null > local_nvme.log 2>&1 &
cat > install.sh <<'END_OF_INSTALL'
@INSTALL@
END_OF_INSTALL

cat > run.sh <<'END'
#!/bin/bash
set -uo pipefail
cd "$(dirname "$0")" || exit 1
power_off() {
  trap '' EXIT TERM
  kill -TERM $(jobs -p) 2>/dev/null
  wait
  ${RLBOOST_POWER_OFF:-shutdown -h now}
}
trap power_off EXIT
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
if [ -s install.sh ] && [ ! -e installed ]; then
  timeout @BOOT_S@ bash install.sh >> install.log 2>&1 && touch installed || exit 1
fi
number=0
for instance in @INSTANCES@; do
  "${RLBOOST_PYTHON:-$PWD/venv/bin/python}" -m rlboost_runtime.agent "$PWD/bootstrap.json" "$instance" \
    >> "agent-$number.log" 2>&1 &
  number=$((number + 1))
done
agents=$(jobs -p)
set -- @TRAINER_NODE@
if [ $# -gt 0 ]; then # ended when the agents have ended, which know whether the run goes on
  until "${RLBOOST_PYTHON:-$PWD/venv/bin/python}" -m rlboost_runtime.trainer.node "$@" >> node.log 2>&1; do
    sleep 5
  done &
fi
for agent in $agents; do while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done; done
END

if [ -d /run/systemd/system ] && [ -z "${RLBOOST_ROOT:-}" ]; then
  cat > /etc/systemd/system/rlboost.service <<END
[Unit]
Description=RLBoost agents of this spot machine
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/bin/bash $root/run.sh
KillMode=mixed
TimeoutStopSec=120
[Install]
WantedBy=multi-user.target
END
  systemctl daemon-reload
  systemctl enable --now --no-block rlboost.service
else
  setsid bash run.sh > run.log 2>&1 < /dev/null &
fi
