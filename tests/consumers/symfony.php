<?php
// A Symfony application with the YAML of docs/consumers.md: symfony.php YAML CACHE_DIRECTORY. Consumes one message, and prints what its
// handler got.

namespace App\Message {
    class OrderPlaced
    {
        public int $order;
    }
}

namespace Composer {
    // Symfony 6.4 asks Composer whether it has installed a package. Nothing here comes from Composer.
    class InstalledVersions
    {
        public static function isInstalled(string $package): bool
        {
            return false;
        }
    }
}

namespace {
    error_reporting(E_ERROR); // Debian's packages are older than its PHP
    // In this order: Debian 13's FrameworkBundle loads neither Console nor Yaml.
    foreach (['Component/Console', 'Component/Yaml', 'Bundle/FrameworkBundle', 'Component/Messenger', 'Component/Messenger/Bridge/Amqp',
              'Component/PropertyAccess', 'Component/PropertyInfo', 'Component/Serializer'] as $package) {
        require_once "/usr/share/php/Symfony/$package/autoload.php";
    }

    use App\Message\OrderPlaced;
    use Symfony\Bundle\FrameworkBundle\Console\Application;
    use Symfony\Bundle\FrameworkBundle\FrameworkBundle;
    use Symfony\Component\Config\Loader\LoaderInterface;
    use Symfony\Component\Console\Input\ArrayInput;
    use Symfony\Component\DependencyInjection\ContainerBuilder;
    use Symfony\Component\HttpKernel\Kernel;
    use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpReceivedStamp;
    use Symfony\Component\Messenger\Event\WorkerMessageReceivedEvent;

    class Orders
    {
        public static array $seen = [];

        public function __invoke(OrderPlaced $order): void
        {
            self::$seen['order'] = $order->order;
        }

        public function received(WorkerMessageReceivedEvent $event): void
        {
            $message = $event->getEnvelope()->last(AmqpReceivedStamp::class)->getAmqpEnvelope();
            self::$seen += ['id' => $message->getMessageId(), 'aggregate_id' => $message->getHeader('aggregate_id')];
        }
    }

    class Shop extends Kernel
    {
        public function __construct(private string $yaml, private string $cache)
        {
            parent::__construct('prod', false);
        }

        public function registerBundles(): iterable
        {
            return [new FrameworkBundle()];
        }

        public function getProjectDir(): string
        {
            return $this->cache;
        }

        public function registerContainerConfiguration(LoaderInterface $loader): void
        {
            $loader->load($this->yaml);
            $loader->load(function (ContainerBuilder $container): void {
                $container->loadFromExtension('framework', ['secret' => 'x', 'serializer' => ['enabled' => true]]);
                $container->register(Orders::class, Orders::class)
                    ->addTag('messenger.message_handler')
                    ->addTag('kernel.event_listener', ['event' => WorkerMessageReceivedEvent::class, 'method' => 'received']);
            });
        }
    }

    $application = new Application(new Shop($argv[1], $argv[2]));
    $application->setAutoExit(false);
    $code = $application->run(new ArrayInput(['messenger:consume', 'receivers' => ['orders'], '--limit' => 1]));
    echo json_encode(Orders::$seen), "\n";
    exit($code);
}
