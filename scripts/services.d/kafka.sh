# shellcheck shell=bash disable=SC2034,SC2154 # variables shared with scripts/lib/services.sh
#
# Apache Kafka in KRaft mode: one node that is broker and controller. Three listeners for clients:
# without a login, with one (SASL PLAIN, user `onlyonce`, password `onlyonce`), and over TLS.
#
# The jars come through Maven once and are kept in the service's directory, beside the data.
#
# Clients follow the addresses that a broker advertises. For those that are to come through a proxy it
# has further listeners, each of which advertises a port at which nobody listens: the proxy's.

unset "${!KAFKA_@}" CLASSPATH JAVA_TOOL_OPTIONS # The caller's are about other programs.

readonly kafka_version=${ONLYONCE_KAFKA_VERSION:-4.1.1} java_least=17
readonly kafka_user=onlyonce kafka_password=onlyonce
readonly kafka_links=4

svc_ports() {
    local link
    cat <<END
port 19092
controller_port 19093
sasl_port 19094
tls_port 19095
END
    for ((link = 1; link <= kafka_links; link++)); do
        echo "listener_$link $((19100 + link))"
        echo "link_$link $((19200 + link)) theirs"
    done
}

svc_find() {
    find_java && command -v openssl >/dev/null || return 1
    [[ $dir ]] || enter # `up` looks before it settles on a directory.
    kafka_libs=${ONLYONCE_KAFKA_LIBS:-$dir/jars-$kafka_version}
    compgen -G "$kafka_libs/kafka-server-*.jar" >/dev/null
}

find_java() {
    local candidate version
    while read -r candidate; do
        [[ -x $candidate ]] || continue
        version=$("$candidate" -version 2>&1 | grep -o 'version "[0-9]*' | grep -o '[0-9]*$') || continue
        if ((version >= java_least)); then
            java=$candidate
            return
        fi
    done < <(java_candidates)
    return 1
}

java_candidates() {
    if [[ ${ONLYONCE_JAVA:-} ]]; then
        echo "$ONLYONCE_JAVA"
        return
    fi
    command -v java || true
    find /usr/lib/jvm -mindepth 3 -maxdepth 3 -path '*/bin/java' 2>/dev/null | sort -rV
}

svc_install() {
    local -a packages=()
    find_java || packages+=(openjdk-17-jre-headless)
    command -v mvn >/dev/null || packages+=(maven)
    command -v openssl >/dev/null || packages+=(openssl)
    if ((${#packages[@]} > 0)); then install_packages '' "${packages[@]}"; fi
    [[ ${ONLYONCE_KAFKA_LIBS:-} ]] || fetch_jars
}

# Under another name until it is complete: an interrupted download must not pass for a server.
fetch_jars() {
    [[ $dir ]] || enter
    local new=$dir/jars.new log=$dir/maven.log
    say "fetching Apache Kafka $kafka_version through Maven"
    rm -rf "$new"
    mkdir -p "$new"
    write_pom >"$new/pom.xml"
    if ! mvn --quiet --batch-mode --file "$new/pom.xml" \
        org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
        -DincludeScope=runtime -DoutputDirectory="$new" </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die "Maven could not fetch Apache Kafka; all of its output is in $log"
    fi
    rm -rf "$dir/jars-$kafka_version"
    mv "$new" "$dir/jars-$kafka_version"
}

write_pom() {
    cat <<END
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>onlyonce</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>$kafka_version</version>
    </dependency>
    <dependency> <!-- what writes the server's log -->
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
END
}

svc_prepare() {
    mkdir -p "$dir/log"
    [[ -s $dir/tls/server.pem ]] || create_certificates >"$dir/log/openssl.log" 2>&1 ||
        fail_with_logs "the certificates could not be created"
    write_settings >"$dir/server.properties"
    write_logging >"$dir/log4j2.properties"
    [[ -e $dir/data/meta.properties ]] || format_storage
}

# An authority that nobody else trusts, and a server's key and certificate of its, in one file.
create_certificates() (
    set -e
    rm -rf "$dir/tls" && mkdir -p "$dir/tls" && cd "$dir/tls"
    openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj '/CN=tests of onlyonce' \
        -keyout authority.key -out authority.pem
    openssl req -newkey rsa:2048 -nodes -subj '/CN=localhost' -keyout server.key -out server.csr
    printf '%s\n' 'subjectAltName = DNS:localhost' 'extendedKeyUsage = serverAuth' >server.ext
    openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 800 \
        -extfile server.ext -out server.crt
    cat server.key server.crt >server.new
    mv server.new server.pem
)

# One partition of offsets is enough for tests, and starts in a tenth of the time that fifty need.
# Without the delay a group's first member need not wait for others.
write_settings() {
    local link listeners='' advertised='' protocols=''
    for ((link = 1; link <= kafka_links; link++)); do
        listeners+=,LINK$link://127.0.0.1:${ports[listener_$link]}
        advertised+=,LINK$link://127.0.0.1:${ports[link_$link]}
        protocols+=,LINK$link:PLAINTEXT
    done
    cat <<END
# Written by scripts/services at every start.
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:${ports[controller_port]}
listeners=PLAINTEXT://127.0.0.1:${ports[port]},CONTROLLER://127.0.0.1:${ports[controller_port]},SASL://127.0.0.1:${ports[sasl_port]},TLS://127.0.0.1:${ports[tls_port]}$listeners
advertised.listeners=PLAINTEXT://127.0.0.1:${ports[port]},CONTROLLER://127.0.0.1:${ports[controller_port]},SASL://127.0.0.1:${ports[sasl_port]},TLS://localhost:${ports[tls_port]}$advertised
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT,TLS:SSL$protocols
listener.name.sasl.sasl.enabled.mechanisms=PLAIN
listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_$kafka_user="$kafka_password";
listener.name.tls.ssl.keystore.type=PEM
listener.name.tls.ssl.keystore.location=$dir/tls/server.pem
log.dir=$dir/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.retention.check.interval.ms=1000
log.cleaner.dedupe.buffer.size=2097152
END
}

write_logging() {
    cat <<END
# Written by scripts/services at every start.
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %m (%c)%n
rootLogger.level=WARN
rootLogger.appenderRef.console.ref=console
END
}

# Under another name until it is complete: an interrupted attempt must not pass for a formatted log.
format_storage() {
    local new=$dir/data.new
    rm -rf "$new" "$dir/data"
    sed "s#^log.dir=.*#log.dir=$new#" "$dir/server.properties" >"$dir/format.properties"
    if ! { run_java kafka.tools.StorageTool format --standalone \
        -t "$(run_java kafka.tools.StorageTool random-uuid)" -c "$dir/format.properties"; } >"$dir/log/format.log" 2>&1; then
        fail_with_logs "the log directory could not be formatted"
    fi
    mv "$new" "$dir/data"
}

run_java() { "$java" -Xmx256m -cp "$kafka_libs/*" "$@"; }

svc_mark() { printf -- '-Donlyonce.service=%s' "$dir"; }

# The serial collector and a small heap: a machine that runs tests has better use for its memory.
svc_command() {
    command=("$java" -Xmx512m -Xms256m -XX:+UseSerialGC -Djava.awt.headless=true
        "-Dlog4j2.configurationFile=$dir/log4j2.properties" "$(svc_mark)"
        -cp "$kafka_libs/*" kafka.Kafka "$dir/server.properties")
}

# A port open is not yet a broker: asks for the versions of its protocol (ApiVersions, version 0,
# correlation id 7) and expects that id and no error in the answer.
svc_ready() (
    LC_ALL=C
    exec 3<>"/dev/tcp/127.0.0.1/${ports[port]}" || exit 1
    printf '\0\0\0\x0a\0\x12\0\0\0\0\0\x07\xff\xff' >&3
    answer=$(timeout 5 head -c 10 <&3 | od -An -v -tx1 | tr -d ' \n')
    [[ ${answer:8:12} == 000000070000 ]]
) 2>/dev/null

svc_describe() { echo "Apache Kafka $kafka_version on 127.0.0.1:${ports[port]}"; }

svc_env() {
    local link links=''
    for ((link = 1; link <= kafka_links; link++)); do
        links+=,127.0.0.1:${ports[listener_$link]}=${ports[link_$link]}
    done
    print_export ONLYONCE_KAFKA_BROKERS "127.0.0.1:${ports[port]}"
    print_export ONLYONCE_KAFKA_SASL_BROKERS "127.0.0.1:${ports[sasl_port]}"
    print_export ONLYONCE_KAFKA_SASL_LOGIN "$kafka_user:$kafka_password"
    print_export ONLYONCE_KAFKA_TLS_BROKERS "localhost:${ports[tls_port]}"
    print_export ONLYONCE_KAFKA_TLS_CA "$dir/tls/authority.pem"
    print_export ONLYONCE_KAFKA_LINKS "${links#,}" # where a proxy's way ends, and the port it has to have
}

svc_logs() { printf '%s\n' "$dir/log/openssl.log" "$dir/log/format.log" "$dir/output.log"; }
