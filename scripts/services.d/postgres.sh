# shellcheck shell=bash disable=SC2034,SC2154 # variables shared with scripts/lib/services.sh
#
# PostgreSQL: one cluster, database and superuser `onlyonce`, password `onlyonce`.

unset "${!PG@}" # The caller's PGHOST, PGOPTIONS, .. are about other servers.

readonly pg_user=onlyonce pg_database=onlyonce
export PGPASSWORD=onlyonce PGCONNECT_TIMEOUT=5

svc_ports() { echo "port 15432"; }

# Finds the programs for the data there is, or else the newest.
svc_find() {
    local candidate version=''
    if [[ $dir && -r $dir/data/PG_VERSION ]]; then version=$(<"$dir/data/PG_VERSION"); fi
    while read -r candidate; do
        if [[ -x $candidate/postgres && -x $candidate/initdb ]] && is_version "$candidate" "$version"; then
            pg_bin=$candidate
            return
        fi
    done < <(pg_candidates)
    [[ -z $version ]] || die "$dir/data was made by PostgreSQL $version, which is not installed (any more);" \
        "install it, or delete that directory"
    return 1
}

pg_candidates() {
    if [[ ${ONLYONCE_POSTGRES_BIN:-} ]]; then
        echo "$ONLYONCE_POSTGRES_BIN"
        return
    fi
    find /usr/lib/postgresql -mindepth 2 -maxdepth 2 -name bin 2>/dev/null | sort -rV
    find /usr -maxdepth 1 -name 'pgsql-*' -printf '%p/bin\n' 2>/dev/null | sort -rV
    if command -v pg_config >/dev/null; then pg_config --bindir; fi
    dirname "$(command -v postgres || echo /nowhere/postgres)"
}

is_version() {
    [[ -z $2 || $("$1/postgres" --version) == *" $2"[^0-9]* ]]
}

svc_install() { install_packages postgresql postgresql; }

# PostgreSQL refuses to run as root. The user that runs it instead needs a directory that it can
# reach, which is not so below a home directory closed to others.
svc_place() {
    if [[ -L $dir ]]; then dir=$(readlink -m "$dir"); fi
    if ((EUID != 0)); then return; fi
    run_as=postgres
    if ! id "$run_as" >/dev/null 2>&1; then
        if ! svc_find; then return; fi # Nothing is installed, nothing will be started.
        die "PostgreSQL does not run as root, and there is no user '$run_as' to run it"
    fi
    take_directory
    if as_server test -w "$dir"; then return; fi

    local elsewhere=/var/tmp/onlyonce-$checkout_key
    say "$dir is out of reach for the user postgres; using $elsewhere"
    rmdir "$dir" || die "make the directories above it accessible (chmod o+x)"
    ln -s "$elsewhere/postgres" "$dir"
    dir=$elsewhere/postgres
    take_directory
    as_server test -w "$dir" || die "$dir is out of reach for the user postgres, too"
}

# In /var/tmp others can put things in the way.
take_directory() {
    local parent
    parent=$(dirname "$dir")
    if [[ $parent == /var/tmp/* ]]; then
        [[ -e $parent ]] || install -d -m 755 "$parent"
        [[ ! -L $parent && -O $parent ]] || die "$parent is not root's own"
    fi
    mkdir -p "$dir"
    chown "$run_as": "$dir"
}

as_server() {
    if [[ $run_as ]]; then
        (cd / && setpriv --reuid "$run_as" --regid "$(id -g "$run_as")" --init-groups "$@")
    else
        "$@"
    fi
}

svc_prepare() {
    [[ -d $dir/data ]] || create_cluster
    as_server mkdir -p "$dir/run"
    write_settings | as_server tee "$dir/data/onlyonce.conf" >/dev/null
}

# Under another name until it is complete: an interrupted attempt must not pass for a cluster.
create_cluster() {
    local new=$dir/data.new
    as_server rm -rf "$new"
    echo "$PGPASSWORD" | as_server tee "$dir/password" >/dev/null
    run_initdb "$new" >"$dir/initdb.log" 2>&1 || fail_with_logs "the cluster could not be created"
    as_server mv "$new" "$dir/data"
}

run_initdb() {
    as_server "$pg_bin/initdb" --pgdata="$1" --username=$pg_user --pwfile="$dir/password" \
        --auth=scram-sha-256 --encoding=UTF8 --locale=C &&
        as_server "$pg_bin/postgres" --single -D "$1" postgres <<<"CREATE DATABASE $pg_database" &&
        echo "include 'onlyonce.conf'" | as_server tee -a "$1/postgresql.conf"
}

write_settings() {
    # A socket's path has about 100 bytes. Without a socket there is still TCP.
    local sockets=$dir/run
    ((${#sockets} < 80)) || sockets=''
    cat <<END
# Written by scripts/services at every start.
listen_addresses = '127.0.0.1'
port = ${ports[port]}
unix_socket_directories = '${sockets//\'/\'\'}'
max_connections = 300
fsync = on
password_encryption = scram-sha-256
log_min_messages = warning
log_line_prefix = '%m [%p] %a '
END
}

# After a crash PostgreSQL refuses to start while a process with the old server's pid exists: that may
# be a zombie, where pid 1 is no real init, or anything at all after a reboot. The file is not
# deleted, as it also tells the new server how to see whether old backends are still at work; it
# only gets a pid beyond those that Linux gives. The socket's lock file tells nothing more.
svc_before_start() {
    local file=$dir/data/postmaster.pid
    rm -f "$dir"/run/.s.PGSQL.*
    [[ -e $file ]] || return 0
    is_ours "$file" "$(svc_mark)" || as_server sed -i '1s/.*/4194305/' "$file"
}

svc_mark() { printf -- '-D %s' "$dir/data"; }

svc_command() { command=("$pg_bin/postgres" -D "$dir/data"); }

svc_request_stop() { kill -s INT "$1"; } # "fast": disconnects clients

svc_ready() { query 'SELECT 1' >/dev/null 2>&1; }

query() { "$pg_bin/psql" -X -w -A -t -h 127.0.0.1 -p "${ports[port]}" -U $pg_user -d $pg_database -c "$1"; }

svc_describe() {
    local version
    version=$(query 'SHOW server_version')
    echo "PostgreSQL ${version%% *} on 127.0.0.1:${ports[port]}"
}

svc_env() {
    print_export ONLYONCE_POSTGRES_URL "postgres://$pg_user:$PGPASSWORD@127.0.0.1:${ports[port]}/$pg_database"
}

svc_logs() {
    if [[ -d $dir/data ]]; then echo "$dir/output.log"; else echo "$dir/initdb.log"; fi
}
