# The part that a Rails application already has: a connection to DATABASE_URL. run_rails.rb MIGRATION CLASS up|down
require "active_record"

ActiveRecord::Base.establish_connection(ENV.fetch("DATABASE_URL"))
load ARGV[0]
ActiveRecord::Migration.suppress_messages { Object.const_get(ARGV[1]).migrate(ARGV[2].to_sym) }
