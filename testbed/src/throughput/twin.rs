//! The database's side of the loop written by hand.

use std::collections::HashSet;

use sqlx::{Connection as _, PgConnection};

use super::{BoxError, Done, insert, insert_all};

/// How the loop written by hand is to run, and what it does with each batch.
#[derive(Debug)]
pub struct Twin {
    /// How many tasks work at once.
    pub lanes: usize,
    /// How many events a transaction has at most.
    pub batch: usize,
    pub(super) done: Done,
    /// `None`: nothing is applied.
    postgres: Option<String>,
    /// The effects of a batch go into the table by one statement.
    at_once: bool,
}

impl Twin {
    pub(super) fn new(postgres: &str, lanes: usize, batch: usize, done: &Done) -> Self {
        Self {
            lanes,
            batch,
            done: done.clone(),
            postgres: Some(postgres.to_owned()),
            at_once: false,
        }
    }

    pub(super) fn bare(lanes: usize, batch: usize, done: &Done) -> Self {
        Self {
            lanes,
            batch,
            done: done.clone(),
            postgres: None,
            at_once: false,
        }
    }

    pub(super) fn at_once(self) -> Self {
        Self {
            at_once: true,
            ..self
        }
    }

    /// A connection for one lane.
    pub async fn lane(&self) -> Result<TwinLane, BoxError> {
        let conn = match &self.postgres {
            None => None,
            Some(url) => Some(PgConnection::connect(url).await?),
        };
        Ok(TwinLane {
            conn,
            done: self.done.clone(),
            at_once: self.at_once,
        })
    }
}

/// One lane's connection.
#[derive(Debug)]
pub struct TwinLane {
    conn: Option<PgConnection>,
    done: Done,
    at_once: bool,
}

impl TwinLane {
    /// Applies events, given as id and body, in one transaction; ack them after that.
    pub async fn apply(&mut self, events: &[(&str, &[u8])]) -> Result<(), BoxError> {
        let Some(conn) = &mut self.conn else {
            self.done.add(events.len());
            return Ok(());
        };
        let mut tx = conn
            .begin_with(
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = 2000; \
                 SET LOCAL statement_timeout = 30000; \
                 SET LOCAL idle_in_transaction_session_timeout = 35000",
            )
            .await?;
        match events {
            [(id, body)] => {
                if claim(&mut tx, id).await? {
                    insert(&mut tx, id, body).await?;
                }
            }
            _ => {
                let new = claim_all(&mut tx, events.iter().map(|(id, _)| *id).collect()).await?;
                let new = events.iter().filter(|(id, _)| new.contains(*id)).copied();
                if self.at_once {
                    let (ids, bodies) = new.unzip();
                    insert_all(&mut tx, ids, bodies).await?;
                } else {
                    for (id, body) in new {
                        insert(&mut tx, id, body).await?;
                    }
                }
            }
        }
        // Counted where the handlers count.
        self.done.add(events.len());
        tx.commit().await?;
        Ok(())
    }
}

async fn claim(conn: &mut PgConnection, id: &str) -> sqlx::Result<bool> {
    let inserted = sqlx::query(
        "INSERT INTO bench.by_hand (consumer, source, event_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
    )
    .bind("bench")
    .bind("bench")
    .bind(id)
    .execute(conn)
    .await?;
    Ok(inserted.rows_affected() == 1)
}

async fn claim_all(conn: &mut PgConnection, ids: Vec<&str>) -> sqlx::Result<HashSet<String>> {
    let inserted: Vec<String> = sqlx::query_scalar(
        "INSERT INTO bench.by_hand (consumer, source, event_id) SELECT 'bench', 'bench', * FROM unnest($1::text[]) \
         ON CONFLICT DO NOTHING RETURNING event_id",
    )
    .bind(ids)
    .fetch_all(conn)
    .await?;
    Ok(inserted.into_iter().collect())
}
