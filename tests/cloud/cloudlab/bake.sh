# Makes /home of the lab's image in the folder $1; runs in a mount namespace of its own.
set -euo pipefail
target=$1 uv=$2 skypilot=$3 uid=$4

mount --make-rprivate /
mount --bind "$target" /home
home=/home/ubuntu
mkdir -p $home/.local/bin $home/.sky $home/.python/lib $home/.python/bin
cp "$uv" $home/.local/bin/uv

# SkyPilot's runtime has a Python of its own, so that it also works where the system has none.
cp /usr/bin/python3.11 $home/.python/bin/
cp -rp /usr/lib/python3.11 $home/.python/lib/ # with their times, or their bytecode would not count as theirs

export HOME=$home UV_LINK_MODE=copy
unset VIRTUAL_ENV PYTHONPATH
uv=$home/.local/bin/uv
$uv venv -q --seed $home/skypilot-runtime --python $home/.python/bin/python3.11
VIRTUAL_ENV=$home/skypilot-runtime $uv pip install -q --compile-bytecode "setuptools<70" "click<8.3.0" "ray[default]==2.9.3" \
  "pydantic-core==2.41.1" "skypilot[aws,remote]==$skypilot"
VIRTUAL_ENV=$home/skypilot-runtime $uv pip uninstall -q skypilot
$uv venv -q --seed --relocatable --system-site-packages --python $home/.python/bin/python3.11 $home/sky-user-env
rm -rf $home/.cache
chown -R "$uid:$uid" $home
