//! The two stores keep their promises.

mod support;

mod sqlite {
    onlyonce_conformance::store_suite!(onlyonce_conformance::Sqlite);
}

mod postgres {
    onlyonce_conformance::store_suite!(crate::support::Postgres);
}
