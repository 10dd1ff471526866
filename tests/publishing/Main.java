import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.jdbc.datasource.DataSourceTransactionManager;
import org.springframework.jdbc.datasource.DriverManagerDataSource;
import org.springframework.transaction.support.TransactionTemplate;

// Calls the class Outbox of the page in a transaction of Spring.
public class Main {
    public static void main(String[] args) {
        var dataSource = new DriverManagerDataSource(System.getenv("JDBC_URL"));
        var transaction = new TransactionTemplate(new DataSourceTransactionManager(dataSource));
        var jdbc = new JdbcTemplate(dataSource);
        transaction.execute(status -> {
            jdbc.update("insert into orders values (65, 7, 99.9)");
            return new Outbox(jdbc).publish("OrderPlaced", "{\"order\": 65, \"total\": 99.9}", "order", 65, "placed");
        });
    }
}
