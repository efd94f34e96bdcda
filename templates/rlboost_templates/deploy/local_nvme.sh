# Gives the local NVMe of a bought machine, where it has one, to RLBoost as /mnt/rlboost-nvme: versions that main
# memory has no room for lie there. Takes what the image has mounted, or one blank, whole disk that the cloud itself
# calls local; whatever else is attached stays as it is. Run as root; harmless when run again.
local_nvme() {
  local at=${RLBOOST_NVME:-/mnt/rlboost-nvme} ids=${RLBOOST_DISK_IDS:-/dev/disk/by-id}
  local image=${RLBOOST_IMAGE_NVME:-/opt/dlami/nvme}
  local disk tried
  if [ -d "$at" ] && [ "$(stat -c %d "$at/.")" != "$(stat -c %d /)" ]; then return; fi
  [ ! -L "$at" ] || rm "$at" # of a machine that was an image's original
  for disk in "$ids"/nvme-Amazon_EC2_NVMe_Instance_Storage_* "$ids"/google-local-nvme-ssd-* \
    "$ids"/nvme-Microsoft_NVMe_Direct_Disk_*; do
    if [ -b "$disk" ]; then set -- "$@" "$disk"; fi
  done
  [ $# -gt 0 ] || return 0
  for tried in $(seq 60); do # Amazon's deep-learning images mount them themselves, while they boot
    [ -d "${image%/*}" ] && ! mountpoint -q "$image" || break
    sleep 0.5
  done
  if mountpoint -q "$image"; then
    mkdir -p -m 1777 "$image/rlboost" && chmod 1777 "$image/rlboost" && ln -sfn "$image/rlboost" "$at"
    return
  fi
  for disk in "$@"; do
    [ "$(lsblk -nro NAME "$disk" | wc -l)" = 1 ] && [ -z "$(wipefs --no-act "$disk")" ] || continue
    mkfs.ext4 -q -E lazy_itable_init=1,nodiscard "$disk" && mkdir -p "$at" && mount -o noatime "$disk" "$at" \
      && chmod 1777 "$at" && return
    rmdir "$at" 2> /dev/null
  done
}
local_nvme
