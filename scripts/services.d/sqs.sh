# shellcheck shell=bash disable=SC2034,SC2154 # variables shared with scripts/lib/services.sh
#
# SQS, by an emulator: ElasticMQ where Maven and Java 17 are to be had, otherwise moto. Both keep
# messages in memory only and take any credentials. `status` and ONLYONCE_SQS_EMULATOR say which one
# runs; tests that moto cannot serve say so and are skipped.
#
#   ONLYONCE_SQS_EMULATOR   elasticmq or moto: that one and no other

readonly elasticmq_version=1.6.14 moto_version=5.2.5
readonly elasticmq_jars=$root/target/elasticmq-$elasticmq_version
readonly moto_bin=$root/target/moto-$moto_version/bin

svc_ports() { echo "port 19324"; }

svc_find() {
    case ${ONLYONCE_SQS_EMULATOR:-any} in
        any) find_elasticmq || find_moto ;;
        elasticmq | moto) "find_$ONLYONCE_SQS_EMULATOR" ;;
        *) die "ONLYONCE_SQS_EMULATOR is '$ONLYONCE_SQS_EMULATOR'; elasticmq and moto are possible" ;;
    esac
}

find_elasticmq() {
    [[ -d $elasticmq_jars ]] && command -v java >/dev/null || return 1
    emulator=elasticmq
}

find_moto() {
    [[ -x $moto_bin/moto_server ]] || return 1
    emulator=moto
}

svc_install() {
    case ${ONLYONCE_SQS_EMULATOR:-any} in
        any)
            (install_elasticmq) || {
                say "ElasticMQ is not to be had here; taking moto, which serves fewer tests"
                install_moto
            }
            ;;
        *) "install_$ONLYONCE_SQS_EMULATOR" ;;
    esac
}

install_elasticmq() {
    local new=$elasticmq_jars.new log
    if ! command -v java >/dev/null || ! command -v mvn >/dev/null; then
        install_packages '' openjdk-17-jre-headless maven
    fi
    say "fetching ElasticMQ $elasticmq_version through Maven"
    rm -rf "$new"
    mkdir -p "$new"
    log=$new/maven.log
    write_pom >"$new/pom.xml"
    # Under another name until it is complete: an interrupted attempt must not pass for an installation.
    if ! mvn -q -B -f "$new/pom.xml" dependency:copy-dependencies -DoutputDirectory="$new/lib" >"$log" 2>&1; then
        tail -n 10 "$log" >&2
        die "Maven could not fetch ElasticMQ; all of its output is in $log"
    fi
    mv -T "$new" "$elasticmq_jars"
}

write_pom() {
    cat <<END
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>onlyonce</groupId>
  <artifactId>elasticmq</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.elasticmq</groupId>
      <artifactId>elasticmq-server_2.13</artifactId>
      <version>$elasticmq_version</version>
    </dependency>
  </dependencies>
</project>
END
}

install_moto() {
    local venv
    venv=$(dirname "$moto_bin")
    command -v python3 >/dev/null || install_packages '' python3-venv
    say "installing moto $moto_version from PyPI"
    rm -rf "$venv"
    if ! { python3 -m venv "$venv" && "$moto_bin/pip" install --quiet "moto[server]==$moto_version"; } >&2; then
        rm -rf "$venv"
        die "moto could not be installed"
    fi
}

svc_prepare() { write_settings >"$dir/elasticmq.conf"; }

write_settings() {
    cat <<END
# Written by scripts/services at every start.
include classpath("application.conf")
node-address { protocol = http, host = "127.0.0.1", port = ${ports[port]}, context-path = "" }
rest-sqs { enabled = true, bind-hostname = "127.0.0.1", bind-port = ${ports[port]}, sqs-limits = strict }
rest-stats { enabled = false }
END
}

# ElasticMQ gets its settings by their path, moto ignores a variable in its arguments: env puts it there.
svc_mark() { printf -- 'onlyonce_sqs=%s' "$dir"; }

svc_command() {
    case $emulator in
        elasticmq)
            command=(java "-Donlyonce_sqs=$dir" "-Dconfig.file=$dir/elasticmq.conf" -Xmx512m -XX:+UseSerialGC
                -XX:TieredStopAtLevel=1 -cp "$elasticmq_jars/lib/*" org.elasticmq.server.Main)
            ;;
        moto)
            # The mark is not moto's: Python keeps unknown -X options to itself.
            command=("$moto_bin/python" -X "onlyonce_sqs=$dir" "$moto_bin/moto_server" -H 127.0.0.1 -p "${ports[port]}")
            ;;
    esac
    echo "$emulator" >"$dir/emulator"
}

# A real call: an open port is not yet a broker.
svc_ready() { [[ $(says ListQueues) == 'HTTP/1.1 200'* ]]; }

says() (
    exec 3<>"/dev/tcp/127.0.0.1/${ports[port]}" || exit 1
    printf 'POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/x-amz-json-1.0\r\nX-Amz-Target: AmazonSQS.%s\r\nAuthorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature=0\r\nContent-Length: 2\r\n\r\n{}' "$1" >&3
    timeout 10 cat <&3
) 2>/dev/null

svc_describe() {
    case $(<"$dir/emulator") in
        elasticmq) echo "ElasticMQ $elasticmq_version on 127.0.0.1:${ports[port]}" ;;
        moto) echo "moto $moto_version on 127.0.0.1:${ports[port]} (no ElasticMQ here)" ;;
    esac
}

svc_env() {
    print_export ONLYONCE_SQS_URL "http://127.0.0.1:${ports[port]}"
    print_export ONLYONCE_SQS_EMULATOR "$(<"$dir/emulator")"
}

svc_logs() { echo "$dir/output.log"; }
