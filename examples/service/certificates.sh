#!/bin/sh
# A throw-away authority and a server's certificate, for 30 days: sh certificates.sh FOLDER [NAME or ADDRESS]...
# For a service that others can reach, use the certificates that your organisation gives you instead.
set -eu
umask 077
folder=$1
shift
mkdir -p "$folder"
cd "$folder"
names="DNS:localhost,IP:127.0.0.1"
for name in "$@"; do
    case $name in
        *[!0-9.]*) names="$names,DNS:$name" ;;
        *) names="$names,IP:$name" ;;
    esac
done
cat > openssl.cnf <<END
[req]
distinguished_name = name
prompt = no
[name]
CN = afield example
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
END
key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
openssl req -x509 -config openssl.cnf -extensions authority $key -days 30 -keyout ca.key -out ca.pem 2> /dev/null
openssl req -new -config openssl.cnf $key -subj "/CN=afield example server" -keyout server.key -out server.csr 2> /dev/null
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 \
    -extfile openssl.cnf -extensions server -out server.pem 2> /dev/null
rm server.csr openssl.cnf
echo "$folder: ca.pem (for clients), server.pem and server.key (for the server)"
