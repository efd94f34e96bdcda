# First process of a lab machine, inside its namespaces: makes the root and becomes sshd.
set -eu
folder=$1 name=$2 user=$3 uid=$4 home_layers=$5 wheels=$6 has_python=$7 has_registry=$8 opt=$9

mount --make-rprivate /
mount -t tmpfs -o size=100g tmpfs "$folder" # as large as a head asks its disk to be, and as empty
mkdir "$folder"/{upper,work,root,home,home.work}
root=$folder/root
mount -t overlay -o lowerdir=/,upperdir="$folder/upper",workdir="$folder/work" overlay "$root"
mount -t overlay -o lowerdir="$home_layers",upperdir="$folder/home",workdir="$folder/home.work" overlay "$root/home"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
for hidden in run root opt work mnt srv; do [ -d "$root/$hidden" ] && mount -t tmpfs -o mode=755 tmpfs "$root/$hidden"; done
for shared in tmp var/tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$shared"; done
if [ -n "$opt" ]; then
  mkdir "$folder"/{opt,opt.work}
  mount -t overlay -o lowerdir="$opt",upperdir="$folder/opt",workdir="$folder/opt.work" overlay "$root/opt"
fi
if [ "$has_registry" = yes ]; then
  mkdir -p "$root/var/wheels"
  mount --bind -o ro "$wheels" "$root/var/wheels"
  touch "$root/usr/local/bin/uv"
  mount --bind "$root/home/ubuntu/.local/bin/uv" "$root/usr/local/bin/uv" # for every account
else
  rm -rf "$root/home/ubuntu/.local" "$root/home/ubuntu/.rlboost" "$root/usr/local/bin/uv"
fi
hostname "$name"

printf '%s' "$USER_DATA" > "$root/run/user-data.sh"
cat > "$root/run/boot.sh" <<'BOOT'
user=$1 uid=$2 has_python=$3
[ "$has_python" = yes ] || rm -f /usr/bin/python3* /usr/bin/pip*
rm -rf /etc/ssh/sshd_config.d /etc/uv /etc/pip.conf
echo "$user:x:$uid:$uid::/home/$user:/bin/bash" >> /etc/passwd
echo "$user:x:$uid:" >> /etc/group
echo "$user:*:19000:0:99999:7:::" >> /etc/shadow
echo "$user ALL=(ALL) NOPASSWD:ALL" > "/etc/sudoers.d/90-$user"
chmod 440 "/etc/sudoers.d/90-$user"
mkdir -p "/home/$user/.ssh" /run/sshd /etc/uv
printf '%s\n' "$AUTHORIZED_KEYS" > "/home/$user/.ssh/authorized_keys"
chown -R "$uid:$uid" "/home/$user/.ssh"
chown "$uid:$uid" "/home/$user"
chmod 700 "/home/$user" "/home/$user/.ssh"
chmod 600 "/home/$user/.ssh/authorized_keys"
echo "127.0.0.1 localhost $(hostname)" > /etc/hosts
: > /etc/resolv.conf
[ ! -e /var/wheels/uv.toml ] || cp /var/wheels/uv.toml /etc/uv/uv.toml
printf '#!/bin/sh\nkill -TERM 1\n' > /usr/local/sbin/shutdown # sshd is this machine's first process
chmod 755 /usr/local/sbin/shutdown
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
if [ -s /run/user-data.sh ]; then # as cloud-init runs it: root, and hardly an environment
  env -i PATH="/home/$user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    bash /run/user-data.sh > /run/user-data.log 2>&1 < /dev/null &
fi
# Ray starts jobs at niceness 15, behind everybody else of their machine. Here that would be behind everybody of
# the host: all machines share its cores.
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /usr/sbin/sshd -D -e \
  -o SetEnv=RAY_worker_niceness=0 -o UseDNS=no -o UsePAM=no -o MaxSessions=200 -o MaxStartups=100 -o PrintMotd=no
BOOT
exec chroot "$root" /bin/bash /run/boot.sh "$user" "$uid" "$has_python"
