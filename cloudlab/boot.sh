#!/usr/bin/env bash
# Make a CloudLab node ready for Muster: CloudLab runs this, as the profile says, whenever the node boots.
#
#   boot.sh                          a node that holds ranks
#   boot.sh nfs-server 10.10.1.0/24  the node that shares /nfs with that network
#   boot.sh nfs-client 10.10.1.254   a node that holds ranks and mounts /nfs from that address
#
# Call it as often as you like: it does what is missing. All it says goes to its log, and each step that fails is named
# there and on standard error; the others are done all the same. Ends with 0 when all are.
set -uo pipefail

# Tests set these to places of their own.
repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
homes=/users
etc=/etc
shared=/nfs
log=/var/log/muster-boot.log
lock=/run/muster-boot.lock
mount_deadline_s=1200 # the server may be a slower machine, and installs a package first
mount_pause_s=5
setup_deadline_s=3600

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

main() {
  local role=${1-} peer=${2-}
  case $role:$# in
    :0 | nfs-server:2 | nfs-client:2) ;;
    --help:1 | -h:1) usage && return 0 ;;
    *)
      printf 'boot.sh: wanted nothing, nfs-server NETWORK or nfs-client ADDRESS, got: %s\n' "$*" >&2
      return 2
      ;;
  esac
  if ((EUID != 0)); then exec sudo -n bash "${BASH_SOURCE[0]}" "$@"; fi
  exec 3>&2 >>"$log" 2>&1
  (umask 077 && : >>"$lock") # nobody else may open it: whoever opens a file can hold its lock
  exec 9>>"$lock"
  flock -w "$setup_deadline_s" 9 || {
    failed "wait for another boot.sh"
    return 1
  }
  say "boot.sh ${*:-(plain)} on $(hostname)"
  local failures=0
  step "ssh between nodes" node_keys
  step "ssh host keys" trust_lan
  if [[ $role == nfs-server ]]; then step "export of $shared" serve_folder "$peer"; fi
  if [[ $role == nfs-client ]]; then step "mount of $shared" mount_folder "$peer"; fi
  if [[ $role != nfs-server ]]; then step "setup.sh" set_up --cpu; fi # it serves files and holds no ranks
  if ((failures)); then
    say "boot.sh: $failures of its steps failed"
    return 1
  fi
  say "boot.sh: ready"
}

say() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*"; }

failed() {
  say "FAILED: $1"
  printf 'boot.sh: failed: %s; see %s\n' "$1" "$log" >&3
}

step() {
  local name=$1
  shift
  say "$name"
  # Not `"$@" || ...`: bash would ignore set -e inside.
  (
    set -e
    "$@"
  )
  local code=$?
  if ((code)); then
    failed "$name"
    failures=$((failures + 1))
  fi
}

# Everybody's own ssh from node to node. CloudLab makes one key for the experiment; every node may ask for it.
node_keys() {
  local folder key
  folder=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf -- '$folder'" EXIT
  key=$folder/key
  (umask 077 && geni-get key >"$key")
  ssh-keygen -y -f "$key" >"$key.pub" # also proves that it is one
  local home failed=0
  for home in "$homes"/*/; do
    if [[ -d $home ]]; then give_key "${home%/}" "$key" || failed=1; fi
  done
  return "$failed"
}

# As the owner of the home, because root would follow any link that the owner has put there. The child inherits neither
# the lock nor the log: any process of that user could use them.
give_key() {
  local home=$1 key=$2 owner group as_owner=()
  owner=$(stat -L -c %u -- "$home") && group=$(stat -L -c %g -- "$home") || return
  if ((owner != EUID)); then as_owner=(setpriv --reuid="$owner" --regid="$group" --clear-groups --); fi
  env -i PATH="$PATH" "${as_owner[@]}" bash -c "$(declare -f take_key say); take_key \"\$@\"" take_key \
    "$home" "$(<"$key.pub")" <"$key" 2>&1 3>&- 9>&- | cat
}

take_key() { # HOME PUBLIC-KEY, with the private key on standard input
  set -eu
  umask 077
  local ssh=$1/.ssh public=$2
  if [[ -L $ssh ]]; then
    say "$ssh is a link; left alone"
    return
  fi
  mkdir -p -- "$ssh"
  chmod 700 -- "$ssh"
  if [[ ! -e $ssh/id_rsa ]]; then
    cat >"$ssh/id_rsa"
    printf '%s\n' "$public" >"$ssh/id_rsa.pub"
    chmod 644 "$ssh/id_rsa.pub"
  elif ! cmp -s - "$ssh/id_rsa"; then
    say "$ssh/id_rsa is another key; left alone"
  fi
  touch "$ssh/authorized_keys"
  if ! grep -qxF -- "$public" "$ssh/authorized_keys"; then
    # The file may lack a line's end, as one does that somebody wrote by hand.
    if [[ -s $ssh/authorized_keys && $(tail -c 1 "$ssh/authorized_keys") ]]; then echo >>"$ssh/authorized_keys"; fi
    printf '%s\n' "$public" >>"$ssh/authorized_keys"
  fi
  chmod 600 "$ssh/authorized_keys"
}

# The nodes are as new to one another as their host keys; the LAN is the experiment's own.
trust_lan() {
  local folder=$etc/ssh/ssh_config.d
  mkdir -p "$folder"
  printf 'Host node* nfs 10.10.1.*\n  StrictHostKeyChecking accept-new\n' >"$folder/50-muster.conf"
}

serve_folder() {
  local network=$1
  command -v exportfs >/dev/null || install_package nfs-kernel-server
  mkdir -p "$shared" "$etc/exports.d"
  chmod 1777 "$shared"
  printf '%s %s(rw,sync,no_subtree_check)\n' "$shared" "$network" >"$etc/exports.d/muster.exports"
  systemctl start nfs-server # its package enables it
  exportfs -ra
}

mount_folder() {
  local server=$1 deadline=$((SECONDS + mount_deadline_s))
  if mountpoint -q "$shared"; then return; fi
  command -v mount.nfs >/dev/null || install_package nfs-common
  mkdir -p "$shared"
  # retry=0: one try a call, for the deadline is ours.
  until timeout 60 mount -t nfs -o rw,hard,retry=0 "$server:$shared" "$shared"; do
    if ((SECONDS >= deadline)); then
      say "$server:$shared could not be mounted for $mount_deadline_s s"
      return 1
    fi
    sleep "$mount_pause_s"
  done
}

install_package() {
  # A lock held by the image's own updates is waited for.
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300)
  "${apt[@]}" install "$1" || { "${apt[@]}" update && "${apt[@]}" install "$1"; }
}

# As the folder's owner, so that .venv is not root's. Its output is in the log.
set_up() {
  local owner as_owner=()
  owner=$(stat -c %U -- "$repository")
  if [[ $owner != "$(id -un)" ]]; then as_owner=(sudo -n -H -u "$owner" --); fi
  timeout "$setup_deadline_s" "${as_owner[@]}" "$repository/setup.sh" "$@" </dev/null 2>&1 3>&- 9>&- | cat
  # git trusts a folder of another user's only when told, and preflight compares commits.
  if command -v git >/dev/null && ! git config --system --get-all safe.directory | grep -xF "$repository" >/dev/null; then
    git config --system --add safe.directory "$repository"
  fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
