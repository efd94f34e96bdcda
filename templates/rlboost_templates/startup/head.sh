#!/bin/bash
# Start-up script of a head that was bought: run by cloud-init (AWS) or the guest agent (Google Cloud), as root, and
# harmless when run again. First comes what ends the machine, so that it ends whatever fails after that; then an
# account for its owner, and the host key by which its owner knows it.
set -uo pipefail
umask 077
root=/opt/rlboost-head
account=@ACCOUNT@
mkdir -p "$root"
[ -e "$root/began" ] || touch "$root/began"

base64 -d <<'END' | gunzip > "$root/watch.py"
@WATCH@
END
cat > "$root/watch.json" <<'END'
@SETTINGS@
END
cat > "$root/watch.sh" <<END
#!/bin/bash
# Keeps the watch alive. A machine without a Python is of no use as a head.
command -v python3 > /dev/null || { sleep 300; shutdown -h now; }
while true; do python3 $root/watch.py $root/watch.json; sleep 5; done
END
if [ -d /run/systemd/system ]; then
  cat > /etc/systemd/system/rlboost-head.service <<END
[Unit]
Description=Ends this RLBoost head when nothing goes on there
[Service]
ExecStart=/bin/bash $root/watch.sh
Restart=always
[Install]
WantedBy=multi-user.target
END
  systemctl daemon-reload
  systemctl enable --now --no-block rlboost-head.service
else
  setsid bash "$root/watch.sh" >> "$root/watch.log" 2>&1 < /dev/null &
fi

cat > "$root/local_nvme.sh" <<'END'
@LOCAL_NVME@
END
bash "$root/local_nvme.sh" < /dev/null > "$root/local_nvme.log" 2>&1 &

id "$account" > /dev/null 2>&1 || useradd --create-home --shell /bin/bash --password '*' "$account"
echo "$account ALL=(ALL) NOPASSWD:ALL" > "/etc/sudoers.d/90-$account"
chmod 440 "/etc/sudoers.d/90-$account"
home=$(getent passwd "$account" | cut -d: -f6)
mkdir -p "$home/.ssh"
cat > "$home/.ssh/authorized_keys" <<'END'
@OWNER_KEY@
END
chown -R "$account:" "$home/.ssh"

cat > /etc/ssh/ssh_host_ed25519_key.new <<'END'
@HOST_KEY@
END
echo '@HOST_KEY_PUBLIC@' > /etc/ssh/ssh_host_ed25519_key.pub
mv /etc/ssh/ssh_host_ed25519_key.new /etc/ssh/ssh_host_ed25519_key
chmod 644 /etc/ssh/ssh_host_ed25519_key.pub
if [ -d /run/systemd/system ]; then
  systemctl reload ssh 2> /dev/null || systemctl reload sshd 2> /dev/null || true
else
  for _ in 1 2 3; do # it may just be starting; once is enough: it refuses everybody while it takes the new key
    sleep 1
    pkill -HUP -o -x sshd && break
  done
fi
