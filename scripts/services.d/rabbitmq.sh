# shellcheck shell=bash disable=SC2034,SC2154 # variables shared with scripts/lib/services.sh
#
# RabbitMQ with its management plugin: one node, administrator `onlyonce`, password `onlyonce`.

unset "${!RABBITMQ_@}" "${!ERL_@}" # The caller's are about other nodes.

readonly rmq_user=onlyonce rmq_password=onlyonce

# `dist` is what rabbitmqctl talks to, `epmd` is Erlang's port mapper: one per node, as a shared one
# would be started by whoever comes first.
svc_ports() {
    cat <<END
port 15673
management_port 15674
dist_port 15675
epmd_port 15676
tls_port 15677
END
}

# The scripts of RabbitMQ itself. Those that Debian puts into the PATH insist on the packaged
# server's user and directories.
svc_find() {
    local candidate
    command -v epmd >/dev/null && command -v openssl >/dev/null || return 1
    while read -r candidate; do
        if [[ -x $candidate/rabbitmq-server && -x $candidate/rabbitmqctl ]]; then
            rmq_bin=$candidate
            return
        fi
    done < <(rmq_candidates)
    return 1
}

rmq_candidates() {
    if [[ ${ONLYONCE_RABBITMQ_BIN:-} ]]; then
        echo "$ONLYONCE_RABBITMQ_BIN"
        return
    fi
    find /usr/lib/rabbitmq/lib /opt -mindepth 2 -maxdepth 2 -path '*/rabbitmq_server-*/sbin' 2>/dev/null | sort -rV
    dirname "$(readlink -f "$(command -v rabbitmq-server || echo /nowhere/rabbitmq-server)")"
}

svc_install() {
    local units=rabbitmq-server
    # Erlang's package starts a port mapper. If that was there before, it is not ours to stop.
    dpkg -s erlang-base >/dev/null 2>&1 || units+=' epmd.socket epmd.service'
    install_packages "$units" rabbitmq-server openssl
}

# The name of the node is part of its data; so it is kept, even if the checkout moves.
node_name() {
    [[ -s $dir/node ]] || echo "onlyonce-$checkout_key@localhost" >"$dir/node"
    cat "$dir/node"
}

svc_prepare() {
    mkdir -p "$dir/home" "$dir/log" "$dir/data" "$dir/conf.d"
    if [[ ! -s $dir/home/.erlang.cookie ]]; then
        (umask 077 && head -c 24 /dev/urandom | base64 | tr -dc 'A-Za-z0-9' >"$dir/home/.erlang.cookie")
        chmod 400 "$dir/home/.erlang.cookie"
    fi
    [[ -s $dir/tls/server.pem ]] || create_certificates >"$dir/log/openssl.log" 2>&1 ||
        fail_with_logs "the certificates could not be created"
    write_settings >"$dir/rabbitmq.conf"
    echo '[].' >"$dir/advanced.config"
    echo '[rabbitmq_management].' >"$dir/enabled_plugins"
    : >"$dir/rabbitmq-env.conf"
    write_ctl "$dir/rabbitmqctl"
}

# An authority that nobody else trusts, and a server's certificate of its.
create_certificates() (
    set -e
    rm -rf "$dir/tls" && mkdir -p "$dir/tls" && cd "$dir/tls"
    openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj '/CN=tests of onlyonce' \
        -keyout authority.key -out authority.pem
    openssl req -newkey rsa:2048 -nodes -subj '/CN=localhost' -keyout server.key -out server.csr
    printf '%s\n' 'subjectAltName = DNS:localhost' 'extendedKeyUsage = serverAuth' >server.ext
    openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 800 \
        -extfile server.ext -out server.new
    mv server.new server.pem
)

write_settings() {
    cat <<END
# Written by scripts/services at every start.
listeners.tcp.local = 127.0.0.1:${ports[port]}
listeners.ssl.local = 127.0.0.1:${ports[tls_port]}
ssl_options.cacertfile = $dir/tls/authority.pem
ssl_options.certfile = $dir/tls/server.pem
ssl_options.keyfile = $dir/tls/server.key
management.tcp.ip = 127.0.0.1
management.tcp.port = ${ports[management_port]}
default_user = $rmq_user
default_pass = $rmq_password
default_user_tags.administrator = true
default_permissions.configure = .*
default_permissions.read = .*
default_permissions.write = .*
disk_free_limit.absolute = 10MB
log.file.level = info
log.console = false
END
}

# All that makes the node this one and keeps it out of /etc and /var/lib; NAME=VALUE lines.
node_environment() {
    cat <<END
HOME=$dir/home
LC_ALL=C.UTF-8
ERL_EPMD_ADDRESS=127.0.0.1
ERL_EPMD_PORT=${ports[epmd_port]}
ERL_CRASH_DUMP=$dir/log/erl_crash.dump
RABBITMQ_NODENAME=$(node_name)
RABBITMQ_DIST_PORT=${ports[dist_port]}
RABBITMQ_CONF_ENV_FILE=$dir/rabbitmq-env.conf
RABBITMQ_CONFIG_FILE=$dir/rabbitmq.conf
RABBITMQ_CONFIG_FILES=$dir/conf.d
RABBITMQ_ADVANCED_CONFIG_FILE=$dir/advanced.config
RABBITMQ_ENABLED_PLUGINS_FILE=$dir/enabled_plugins
RABBITMQ_MNESIA_BASE=$dir/data
RABBITMQ_LOG_BASE=$dir/log
RABBITMQ_LOGS=$dir/log/rabbit.log
RABBITMQ_PID_FILE=$dir/node.pid
RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}
RABBITMQ_CTL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}
END
}

# A rabbitmqctl for this node, for people and for tests.
write_ctl() {
    local line
    {
        echo '#!/usr/bin/env bash'
        echo '# Written by scripts/services at every start: rabbitmqctl for the node of this checkout.'
        # shellcheck disable=SC2016 # expands in the script written
        echo 'unset "${!RABBITMQ_@}" "${!ERL_@}"'
        while IFS= read -r line; do
            print_export "${line%%=*}" "${line#*=}"
        done < <(node_environment)
        printf 'exec %q "$@"\n' "$rmq_bin/rabbitmqctl"
    } >"$1.new"
    chmod 755 "$1.new"
    mv "$1.new" "$1"
}

svc_before_start() {
    stop_epmd
    spawn "$dir/epmd.pid" "$dir/log/epmd.log" epmd -address 127.0.0.1 -port "${ports[epmd_port]}"
    local i
    for ((i = 0; i < 100; i++)); do
        port_taken "${ports[epmd_port]}" && return
        sleep 0.05
    done
    fail_with_logs "epmd does not listen"
}

svc_after_start() { "$dir/rabbitmqctl" --quiet await_startup >/dev/null; }

# At least RabbitMQ 3.10 hangs for 5 s while it stops, as this handler asks a process for something
# that is busy with the stop. A broker that stops at once makes for shorter tests.
svc_request_stop() {
    "$dir/rabbitmqctl" --quiet eval 'gen_event:delete_handler(rabbit_event, rabbit_mgmt_db_handler, stop).' \
        >/dev/null 2>&1 || true
    kill -s TERM "$1"
}

svc_after_stop() { stop_epmd; }

stop_epmd() {
    local i
    for ((i = 0; i < 100; i++)); do
        is_ours "$dir/epmd.pid" "epmd -address 127.0.0.1 -port" || break
        kill -s KILL "$(read_pid "$dir/epmd.pid")" || true # It has nothing to tidy up.
        sleep 0.02
    done
    rm -f "$dir/epmd.pid"
}

svc_mark() { printf -- '-onlyonce_node %s' "$(node_name)"; }

# The unknown flag is for svc_mark. `detached` makes RabbitMQ's script become the server, instead of
# waiting for it.
svc_command() {
    local -a environment
    mapfile -t environment < <(node_environment)
    command=(env detached=1 "${environment[@]}" "$rmq_bin/rabbitmq-server" -onlyonce_node "$(node_name)")
}

svc_ready() {
    [[ $(management_says /api/whoami) == 'HTTP/1.1 200'* ]] && amqp_answers
}

# Sends the protocol's header and expects a method frame: a port open is not yet a broker.
amqp_answers() (
    LC_ALL=C
    exec 3<>"/dev/tcp/127.0.0.1/${ports[port]}" || exit 1
    printf 'AMQP\0\0\011\001' >&3
    IFS= read -r -d '' -n 1 -t 5 type <&3 && [[ $type == $'\001' ]]
) 2>/dev/null

management_says() (
    exec 3<>"/dev/tcp/127.0.0.1/${ports[management_port]}" || exit 1
    printf 'GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Basic %s\r\n\r\n' \
        "$1" "$(printf '%s:%s' $rmq_user $rmq_password | base64)" >&3
    timeout 10 cat <&3
) 2>/dev/null

svc_describe() {
    local version
    version=$(management_says /api/overview | grep -o '"rabbitmq_version":"[^"]*"' | cut -d'"' -f4)
    echo "RabbitMQ $version on 127.0.0.1:${ports[port]}, management on ${ports[management_port]}"
}

svc_env() {
    print_export ONLYONCE_RABBITMQ_URL "amqp://$rmq_user:$rmq_password@127.0.0.1:${ports[port]}/%2f"
    print_export ONLYONCE_RABBITMQ_MANAGEMENT_URL \
        "http://$rmq_user:$rmq_password@127.0.0.1:${ports[management_port]}"
    print_export ONLYONCE_RABBITMQ_TLS_URL "amqps://$rmq_user:$rmq_password@localhost:${ports[tls_port]}/%2f"
    print_export ONLYONCE_RABBITMQ_TLS_CA "$dir/tls/authority.pem"
    print_export ONLYONCE_RABBITMQCTL "$dir/rabbitmqctl"
}

svc_logs() { printf '%s\n' "$dir/log/epmd.log" "$dir/log/rabbit.log" "$dir/output.log"; }
