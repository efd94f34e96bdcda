# Makes this machine, or this container, the original of an image: everything into /opt/rlboost, and no trace of who
# made it. `setup.sh` beside this file is install.sh; `image.json` says what is in the image. Needs sudo, or root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=/opt/rlboost
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

as_root mkdir -p "$root"
as_root chown -R "$(id -u)" "$root"
RLBOOST_ROOT=$root UV_LINK_MODE=copy bash "$here/setup.sh"
sha256sum < "$here/agent.txt" >> "$root/machine.sha256" # the same versions, fewer packages: what agents of vLLM are given
for venv in "$root"/venv "$root"/venv-vllm; do
  if [ -d "$venv" ]; then
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" > /dev/null || true # some packages ship files for other Pythons
  fi
done
mkdir -p "$root/bin"
for uv in "$root/uv/bin/uv" "$HOME/.local/bin/uv" "$(command -v uv || true)"; do
  if [ -x "$uv" ] && [ ! -x "$root/bin/uv" ]; then cp "$uv" "$root/bin/uv"; fi
done
echo "install: bytecode done"
cp "$here/image.json" "$root/image.json"
chmod -R u+rwX,go+rX "$root"
as_root chown -R root: "$root"

# What was this machine's own: its ways in, its watch, its caches. The watch is what would end a machine that is
# forgotten, so the machine ends itself in an hour, whatever becomes of the command that makes the image.
as_root bash -s <<'END_OF_SEAL'
if [ -d /run/systemd/system ] && [ -e /etc/systemd/system/rlboost-head.service ]; then
  shutdown -h +60 2> /dev/null
  systemctl disable --now rlboost-head.service 2> /dev/null
  rm -f /etc/systemd/system/rlboost-head.service
fi
[ ! -L /mnt/rlboost-nvme ] || rm /mnt/rlboost-nvme
rm -rf /opt/rlboost-head /etc/sudoers.d/90-rlboost /home/rlboost/.ssh /home/rlboost/.rlboost /root/.ssh /root/.cache \
  /home/*/.cache /home/*/.bash_history /root/.bash_history /var/lib/cloud/instance*/user-data.txt*
if [ ! -e /.dockerenv ]; then rm -f /etc/ssh/ssh_host_*; fi
if command -v cloud-init > /dev/null; then cloud-init clean --logs > /dev/null 2>&1; fi
[ ! -s /etc/machine-id ] || : > /etc/machine-id
sync
END_OF_SEAL
echo "install: sealed"
