/*
 * A background worker of another extension that enqueues and does not end its transaction, and a session that
 * changes its process id in the shared memory of outbox, so that the process it names is not there.
 */
#include "postgres.h"

#include <signal.h>

#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "access/xact.h"

PG_MODULE_MAGIC;

/* The highest process id of Linux is 4194304. */
#define NO_PROCESS 5000000

PGDLLEXPORT void enqueue_and_end(Datum how);

void
enqueue_and_end(Datum how)
{
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection("postgres", "postgres", 0);
	StartTransactionCommand();
	SPI_connect();
	PushActiveSnapshot(GetTransactionSnapshot());
	SPI_execute("select outbox_publish('T', '{\"label\": \"never\"}', 'item', 'a')", false, 0);
	switch (DatumGetChar(how))
	{
		case 'e':
			elog(ERROR, "ends in a transaction");
		case 'f':
			elog(FATAL, "ends in a transaction");
		default:
			proc_exit(1);
	}
}

PG_FUNCTION_INFO_V1(run_worker);

Datum
run_worker(PG_FUNCTION_ARGS)
{
	BackgroundWorker worker = {0};
	BackgroundWorkerHandle *handle;

	strcpy(worker.bgw_name, "another extension");
	strcpy(worker.bgw_type, "another extension");
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, text_to_cstring(PG_GETARG_TEXT_PP(0)), sizeof(worker.bgw_library_name));
	strcpy(worker.bgw_function_name, "enqueue_and_end");
	worker.bgw_main_arg = CharGetDatum(*text_to_cstring(PG_GETARG_TEXT_PP(1)));
	worker.bgw_notify_pid = MyProcPid;
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
		elog(ERROR, "no slot");
	WaitForBackgroundWorkerShutdown(handle);
	PG_RETURN_VOID();
}

/* As in src/shared/sessions.rs and src/shared/transactions.rs. */
typedef struct
{
	uint32		lock;
	uint32		pid;
	uint32		rest[4];
} Session;

typedef struct
{
	uint64		tenant;
	uint32		pid;
	uint32		xid;
	int64		rest[2 + 16384 / 64];
} Transaction;

PG_FUNCTION_INFO_V1(name_no_process);

Datum
name_no_process(PG_FUNCTION_ARGS)
{
	bool		found;
#if PG_VERSION_NUM >= 170000
	int			number = MyProcNumber;
#else
	int			number = MyProc->pgprocno;
#endif
	Session    *sessions = ShmemInitStruct("outbox sessions", MaxBackends * sizeof(Session), &found);
	Transaction *transactions = ShmemInitStruct("outbox transactions",
												(MaxBackends + PG_GETARG_INT32(0)) * sizeof(Transaction), &found);

	if (sessions[number].pid != MyProcPid || transactions[number].pid != MyProcPid)
		elog(ERROR, "another layout");
	sessions[number].pid = NO_PROCESS;
	transactions[number].pid = NO_PROCESS;
	PG_RETURN_VOID();
}
