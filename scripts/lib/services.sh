# shellcheck shell=bash
#
# What all services of scripts/services have in common. Sourced, never run.
#
# A service is a file scripts/services.d/NAME.sh. It is sourced after this one, with `service` set
# to NAME, and defines
#
#   svc_ports       prints "NAME DEFAULT" lines, one per port; the chosen number is in ports[NAME],
#                   and ONLYONCE_<SERVICE>_<NAME>, in capitals, overrides it. "NAME DEFAULT theirs": at
#                   this one clients listen, as soon as they know it, so it stays as it was first chosen
#   svc_find        finds the server's programs; fails when they are not installed
#   svc_install     installs them, or dies saying what to install
#   svc_prepare     creates data and configuration; called before every start, when ports are chosen
#   svc_command     sets the array `command`: the server, in foreground. Its arguments must contain
#                   what svc_mark prints
#   svc_mark        prints a text by which this very server is recognised in the process table
#   svc_ready       succeeds when clients can do their work
#   svc_describe    prints version and address of the running server
#   svc_env         prints export lines (print_export)
#   svc_logs        prints the paths of the log files worth showing after a failure
#
# and, if the defaults below will not do,
#
#   svc_place               corrects `dir` and `run_as`
#   svc_request_stop PID    knows something better than SIGTERM
#   svc_before_start, svc_after_start, svc_after_stop

: "${scripts:?is set by scripts/services}"

root=$(dirname "$scripts")
readonly root

# A short name for this set of servers, where a path does not fit: node names, directories in /var/tmp.
checkout_key=$(printf '%08x' "$(printf '%s' "${ONLYONCE_SERVICES_DIR:-$root}" | cksum | cut -d' ' -f1)")
readonly checkout_key

readonly start_timeout=120 stop_timeout=60

service=''  # name of the service at hand
dir=''      # everything it keeps: data, configuration, logs, pid files, chosen ports
run_as=''   # user the server runs as; empty: the caller
launched='' # whether this call started it
declare -A ports=()
declare -a command=()

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

print_export() { printf 'export %s=%q\n' "$1" "$2"; }

svc_place() { :; }
svc_request_stop() { kill -s TERM "$1"; }
svc_before_start() { :; }
svc_after_start() { :; }
svc_after_stop() { :; }

# ---------------------------------------------------------------------------------------------
# Actions

action_up() {
    install_if_missing
    enter
    lock
    if is_running; then
        known_ports
        check_asked_ports
    else
        svc_after_stop # A server that ended by itself leaves its helpers behind.
        say "$service is starting"
        choose_ports
        launch
    fi
    wait_until_usable || retry_on_other_ports
    say "$service is up: $(svc_describe)"
}

action_down() {
    enter
    lock
    if is_running; then
        stop
        say "$service is stopped"
    else
        svc_after_stop
        say "$service is not running"
    fi
}

action_restart() {
    enter
    lock
    known_ports
    stop
    launch
    wait_until_usable || fail_with_logs "$service did not start"
    say "$service is up again: $(svc_describe)"
}

action_kill() {
    enter
    lock
    is_running || die "$service is not running"
    kill_hard
    svc_after_stop
    say "$service is killed"
}

action_status() {
    enter
    if ! is_running; then
        printf '%-10s down\n' "$service"
        return 1
    fi
    load_ports || true
    if svc_find && svc_ready; then
        printf '%-10s up    %s, pid %s\n' "$service" "$(svc_describe)" "$(read_pid "$dir/server.pid")"
    else
        printf '%-10s runs, but does not answer; logs: %s\n' "$service" "$(svc_logs | xargs)"
        return 1
    fi
}

action_env() {
    enter
    known_ports
    svc_env
}

# ---------------------------------------------------------------------------------------------
# Life of a server

# Settles where the service lives.
enter() {
    local base=${ONLYONCE_SERVICES_DIR:-$root/target/services}
    mkdir -p "$base"
    base=$(cd "$base" && pwd -P)
    [[ -O $base ]] || die "$base belongs to $(stat -c %U "$base"); use scripts/services as that user"
    dir=$base/$service
    svc_place
    mkdir -p "$dir"
}

# One process at a time may start or stop a service. The lock goes with this shell; `spawn` sees to
# it that servers do not inherit it.
lock() {
    exec {lock_fd}>"$dir/lock"
    flock -w $((start_timeout + stop_timeout)) "$lock_fd" || die "another scripts/services holds $dir/lock"
}

is_running() { is_ours "$dir/server.pid" "$(svc_mark)"; }

launch() {
    svc_find || die "$service is not installed in a version that fits the data in $dir"
    svc_prepare
    svc_before_start
    svc_command
    spawn "$dir/server.pid" "$dir/output.log" "${command[@]}"
    launched=yes
}

wait_until_usable() {
    local deadline=$((SECONDS + start_timeout))
    while ((SECONDS < deadline)); do
        is_running || return 1
        # Looked at twice, as a foreign server might answer on the port that ours failed to get.
        if svc_ready && is_running; then
            if [[ $launched ]]; then svc_after_start; fi
            return
        fi
        sleep 0.1
    done
    return 1
}

# The one failure worth a second try: somebody took a port between the look and the start.
retry_on_other_ports() {
    local port taken=''
    if is_running; then fail_with_logs "$service runs, but does not answer"; fi
    svc_after_stop
    for port in "${ports[@]}"; do
        if port_taken "$port"; then taken+=" $port"; fi
    done
    [[ $taken ]] || fail_with_logs "$service did not start"
    say "$service did not start, and somebody else has its port:$taken"
    choose_ports
    launch
    wait_until_usable || fail_with_logs "$service did not start"
}

stop() {
    if is_running; then
        svc_request_stop "$(read_pid "$dir/server.pid")"
        if ! wait_until_gone $stop_timeout; then
            say "$service does not stop within $stop_timeout s: killing it"
            kill_hard
        fi
    fi
    svc_after_stop
    rm -f "$dir/server.pid"
}

# A crash: the server first, so that it cannot react to the end of its children, then those.
kill_hard() {
    local pid children
    pid=$(read_pid "$dir/server.pid")
    children=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null || true)
    kill -s KILL "$pid"
    # shellcheck disable=SC2086 # several numbers
    [[ -z $children ]] || kill -s KILL $children 2>/dev/null || true
    wait_until_gone 10 || die "$service (pid $pid) survives SIGKILL"
    rm -f "$dir/server.pid"
}

wait_until_gone() {
    local deadline=$((SECONDS + $1))
    while is_running; do
        ((SECONDS < deadline)) || return 1
        sleep 0.05
    done
}

fail_with_logs() {
    local log
    say "error: $*"
    while read -r log; do
        [[ -s $log ]] || continue
        say "--- last lines of $log"
        tail -n 30 "$log" >&2
    done < <(svc_logs)
    exit 1
}

# ---------------------------------------------------------------------------------------------
# Processes

# spawn PIDFILE LOG COMMAND..: runs COMMAND as a daemon in a session of its own.
spawn() {
    local pidfile=$1 log=$2
    shift 2
    rm -f "$pidfile"
    # The inner shell becomes the server, so that its pid is the server's. It closes whatever the
    # caller had open: a server holding the end of somebody's pipe or lock would hang that caller.
    # shellcheck disable=SC2016 # expands in the inner shell
    (cd "$dir" && setsid --fork bash -c '
        pidfile=$1 run_as=$2
        shift 2
        for fd in /proc/self/fd/*; do
            fd=${fd##*/}
            if ((fd > 2)); then eval "exec $fd>&-"; fi
        done
        echo $$ >"$pidfile.new"
        mv "$pidfile.new" "$pidfile"
        if [[ $run_as ]]; then
            exec setpriv --reuid "$run_as" --regid "$(id -g "$run_as")" --init-groups "$@"
        fi
        exec "$@"' spawn "$pidfile" "$run_as" "$@" </dev/null >>"$log" 2>&1)
    wait_for_file "$pidfile"
}

wait_for_file() {
    local i
    for ((i = 0; i < 250; i++)); do
        [[ ! -s $1 ]] || return 0
        sleep 0.02
    done
    die "$1 was not written"
}

read_pid() {
    local pid=''
    [[ ! -r $1 ]] || read -r pid <"$1" || true
    printf '%s' "$pid"
}

# Whether the process of a pid file is alive and is what was started from here: pids are reused.
# A zombie counts as dead; it has no arguments.
is_ours() {
    local pid
    pid=$(read_pid "$1")
    [[ $pid =~ ^[0-9]+$ ]] && [[ $(arguments_of "$pid") == *"$2"* ]]
}

# A process has none for a moment, too, while it becomes another program: so it is looked at again.
arguments_of() {
    local arguments='' i
    for ((i = 0; i < 10; i++)); do
        arguments=$({ tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null) || true
        [[ -z $arguments && -d /proc/$1 ]] || break
        sleep 0.02
    done
    printf '%s' "$arguments"
}

# ---------------------------------------------------------------------------------------------
# Ports

port_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

port_variable() { echo "ONLYONCE_${service^^}_${1^^}"; }

# Ports are remembered, as clients keep addresses over a restart.
load_ports() {
    local name number
    [[ -r $dir/ports ]] || return 1
    while read -r name number; do
        ports[$name]=$number
    done <"$dir/ports"
}

# All ports of a service that has been up before.
known_ports() {
    local name default whose
    load_ports || die "$service was never up; scripts/services up $service"
    # shellcheck disable=SC2034 # the third word
    while read -r name default whose; do
        [[ ${ports[$name]:-} ]] ||
            die "$service was last started without its $name; scripts/services down $service, then up"
    done < <(svc_ports)
}

choose_ports() {
    local name default whose variable asked number
    load_ports || true
    while read -r name default whose; do
        variable=$(port_variable "$name")
        asked=${!variable:-}
        number=${asked:-${ports[$name]:-$default}}
        if [[ $whose && ${ports[$name]:-} == "$number" ]]; then continue; fi
        if port_taken "$number"; then
            [[ -z $asked ]] || die "port $asked ($variable) is taken"
            say "$service: port $number is taken, choosing another"
            number=$(free_port)
        fi
        ports[$name]=$number
    done < <(svc_ports)
    for name in "${!ports[@]}"; do
        echo "$name ${ports[$name]}"
    done | sort >"$dir/ports"
}

# Below the range of ports for outgoing connections, and starting elsewhere in every checkout.
free_port() {
    local start=$((16#$checkout_key % 10000)) i number
    for ((i = 0; i < 1000; i++)); do
        number=$((20000 + (start + i) % 10000))
        if [[ " ${ports[*]} " != *" $number "* ]] && ! port_taken "$number"; then
            echo "$number"
            return
        fi
    done
    die "no free port"
}

check_asked_ports() {
    local name variable asked
    for name in "${!ports[@]}"; do
        variable=$(port_variable "$name")
        asked=${!variable:-${ports[$name]}}
        [[ $asked == "${ports[$name]}" ]] ||
            die "$service is up, but not on port $asked ($variable); scripts/services down $service first"
    done
}

# ---------------------------------------------------------------------------------------------
# Installation

install_if_missing() {
    if svc_find; then return; fi
    svc_install
    svc_find || die "$service is installed, but its programs were not found"
}

# install_packages UNITS PACKAGE..: only the programs are wanted. The servers that come with the
# packages (UNITS) are not to be started, neither now nor at the next boot.
install_packages() {
    local units=$1 log
    shift
    if ! command -v apt-get >/dev/null; then
        die "$service is not installed; install it with your package manager (Debian calls it $*)"
    elif ((EUID != 0)); then
        die "$service is not installed; as root: apt-get install --no-install-recommends $*"
    fi
    say "installing $*"
    log=$(mktemp)
    if ! (apt_install "$@") >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die "apt-get install $* failed; all of its output is in $log"
    fi
    rm -f "$log"
    # shellcheck disable=SC2086 # several words
    disable_units $units
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    deny_autostart
    apt-get update || say "apt-get update failed; going on with the lists there are"
    apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" </dev/null
}

# Debian's packages ask policy-rc.d whether they may start what they bring. The answer is no until
# this subshell ends; a policy of the administrator's own is put back then.
deny_autostart() {
    local policy=/usr/sbin/policy-rc.d answer=0
    if [[ -x $policy ]]; then
        "$policy" "$service" start || answer=$?
        ((answer != 101)) || return 0
    fi
    [[ ! -e $policy ]] || mv -n "$policy" "$policy.kept"
    trap 'rm -f /usr/sbin/policy-rc.d; mv /usr/sbin/policy-rc.d.kept /usr/sbin/policy-rc.d 2>/dev/null || true' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

disable_units() {
    local unit
    for unit in "$@"; do
        if [[ -d /run/systemd/system ]]; then
            systemctl disable --now --quiet "$unit" || true
        elif [[ -x /etc/init.d/$unit ]]; then
            update-rc.d "$unit" disable >/dev/null || true
        fi
    done
}
